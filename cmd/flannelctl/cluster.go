// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"regexp"
	"time"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/subnet"
)

// clusterFlags say where flanneld's pods are in a cluster of Kubernetes, and how long a host or pod may take.
type clusterFlags struct {
	namespace, selector string
	timeout             time.Duration
}

func (f *clusterFlags) addTo(cmd *cobra.Command, timeout time.Duration, usage string) {
	cmd.Flags().StringVar(&f.namespace, "namespace", "kube-flannel", "namespace of flanneld's pods, on Kubernetes")
	cmd.Flags().StringVar(&f.selector, "selector", "app=flannel", "label of flanneld's pods, on Kubernetes")
	cmd.Flags().DurationVar(&f.timeout, "timeout", timeout, usage)
}

// check returns an error for an invalid value.
func (f *clusterFlags) check() error {
	switch {
	case f.timeout <= 0:
		return fmt.Errorf("--timeout %s is invalid: expected a time above zero", f.timeout)
	case !isNamespace(f.namespace):
		return fmt.Errorf("--namespace %q is invalid: expected a name such as kube-flannel", subnet.Shorten(f.namespace))
	case !isSelector(f.selector):
		return fmt.Errorf("--selector %q is invalid: expected labels such as app=flannel", subnet.Shorten(f.selector))
	}
	return nil
}

// isNamespace reports whether text may be the name of a namespace of Kubernetes.
func isNamespace(text string) bool {
	return regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`).MatchString(text)
}

// isSelector reports whether text may select pods by labels. It refuses an empty text, which would
// select all pods.
func isSelector(text string) bool {
	const (
		key   = `[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?`
		value = `[-A-Za-z0-9_.]*`
		one   = `\s*(!\s*` + key + `|` + key + `(\s*(=|==|!=)\s*` + value + `|\s+(in|notin)\s*\(\s*` + value + `(\s*,\s*` + value + `)*\s*\))?)\s*`
	)
	return regexp.MustCompile(`^` + one + `(,` + one + `)*$`).MatchString(text)
}
