package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"flanneld/cmd/flanneld/app"
	"flanneld/subnet/etcd"
)

// storeFlags say where the store is. They are the daemon's own, as are the
// variables that stand for them.
type storeFlags struct {
	values map[string]*string
	kube   *bool
}

// addKubeTo adds the flags for the Kubernetes API, for commands that work on it.
func (s *storeFlags) addKubeTo(cmd *cobra.Command) {
	s.addTo(cmd)
	s.kube = cmd.PersistentFlags().Bool("kube-subnet-mgr", false, "the store is the Kubernetes API (FLANNELD_KUBE_SUBNET_MGR)")
	for _, f := range [][2]string{
		{"kubeconfig-file", "how to reach it; without, by the service account of the pod (FLANNELD_KUBECONFIG_FILE)"},
		{"kube-api-url", "where it is (FLANNELD_KUBE_API_URL)"},
		{"kube-annotation-prefix", "of the annotations (FLANNELD_KUBE_ANNOTATION_PREFIX)"},
	} {
		s.values[f[0]] = cmd.PersistentFlags().String(f[0], "", f[1])
	}
}

// addTo adds the flags to a command and all below it.
func (s *storeFlags) addTo(cmd *cobra.Command) {
	s.values = map[string]*string{}
	for _, f := range [][2]string{
		{"etcd-endpoints", "where etcd is, comma separated (FLANNELD_ETCD_ENDPOINTS)"},
		{"etcd-prefix", "key below which everything is (FLANNELD_ETCD_PREFIX)"},
		{"etcd-cafile", "CA bundle for etcd (FLANNELD_ETCD_CAFILE)"},
		{"etcd-certfile", "TLS client certificate (FLANNELD_ETCD_CERTFILE)"},
		{"etcd-keyfile", "its key (FLANNELD_ETCD_KEYFILE)"},
		{"etcd-username", "user of etcd (FLANNELD_ETCD_USERNAME)"},
	} {
		s.values[f[0]] = cmd.PersistentFlags().String(f[0], "", f[1])
	}
}

// options are what flags and variables say. The password comes by
// FLANNELD_ETCD_PASSWORD alone: flags are in the process list.
func (s *storeFlags) options() (app.Options, error) {
	var args []string
	for name, value := range s.values {
		if *value == "" {
			continue
		}
		args = append(args, "--"+name+"="+*value)
		if strings.HasPrefix(name, "kube") {
			args = append(args, "--kube-subnet-mgr")
		}
	}
	if s.kube != nil && *s.kube {
		args = append(args, "--kube-subnet-mgr")
	}
	args = append(args, "--net-config-path=/dev/null") // the daemon's own affair
	return app.Parse(args, os.Environ())
}

// admin opens etcd.
func (s *storeFlags) admin() (*etcd.Admin, error) {
	o, err := s.options()
	if err != nil {
		return nil, err
	}
	if o.KubeSubnetMgr {
		return nil, fmt.Errorf("%s is set: this command works on etcd; on Kubernetes the API hands out subnets, "+
			"as podCIDRs of Nodes, and the configuration is a ConfigMap", o.Source("kube-subnet-mgr"))
	}
	return etcd.NewAdmin(etcd.Config{
		Endpoints: o.EtcdEndpoints, Prefix: o.EtcdPrefix,
		CertFile: o.EtcdCertFile, KeyFile: o.EtcdKeyFile, CAFile: o.EtcdCAFile,
		Username: o.EtcdUsername, Password: o.EtcdPassword.Reveal(),
	})
}
