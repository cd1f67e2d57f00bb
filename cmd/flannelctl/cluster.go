// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/flanneld/flanneld/subnet"
)

// clusterFlags say where flanneld's pods are in a cluster of Kubernetes, and how long a host or pod may take.
type clusterFlags struct {
	namespace, selector string
	timeout             time.Duration
}

// addTo adds the flags to a command, which does not run if a value is invalid.
func (f *clusterFlags) addTo(cmd *cobra.Command, timeout time.Duration, usage string) {
	cmd.Flags().StringVar(&f.namespace, "namespace", "kube-flannel", "namespace of flanneld's pods, on Kubernetes")
	cmd.Flags().StringVar(&f.selector, "selector", "app=flannel", "label of flanneld's pods, on Kubernetes")
	cmd.Flags().DurationVar(&f.timeout, "timeout", timeout, usage)
	cmd.PreRunE = f.check
}

// check returns an error for an invalid value. An empty selector would select all pods.
func (f *clusterFlags) check(*cobra.Command, []string) error {
	selector, err := labels.Parse(f.selector)
	switch {
	case f.timeout <= 0:
		return openError{fmt.Errorf("--timeout %s is invalid: expected a time above zero", f.timeout)}
	case len(validation.IsDNS1123Label(f.namespace)) > 0:
		return openError{fmt.Errorf("--namespace %q is invalid: expected a name such as kube-flannel", subnet.Shorten(f.namespace))}
	case err != nil || selector.Empty():
		return openError{fmt.Errorf("--selector %q is invalid: expected labels such as app=flannel", subnet.Shorten(f.selector))}
	}
	return nil
}
