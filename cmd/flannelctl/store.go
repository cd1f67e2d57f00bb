package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"flanneld/cmd/flanneld/app"
	"flanneld/subnet/etcd"
)

// storeFlags say where the store is. They are the daemon's own, as are the
// variables that stand for them.
type storeFlags struct{ values map[string]*string }

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

// admin opens the store. The password comes by FLANNELD_ETCD_PASSWORD alone:
// flags are in the process list.
func (s *storeFlags) admin() (*etcd.Admin, error) {
	var args []string
	for name, value := range s.values {
		if *value != "" {
			args = append(args, "--"+name+"="+*value)
		}
	}
	o, err := app.Parse(args, os.Environ())
	if err != nil {
		return nil, err
	}
	if o.KubeSubnetMgr {
		return nil, fmt.Errorf("%s is set: this command works on etcd", o.Source("kube-subnet-mgr"))
	}
	return etcd.NewAdmin(etcd.Config{
		Endpoints: o.EtcdEndpoints, Prefix: o.EtcdPrefix,
		CertFile: o.EtcdCertFile, KeyFile: o.EtcdKeyFile, CAFile: o.EtcdCAFile,
		Username: o.EtcdUsername, Password: o.EtcdPassword.Reveal(),
	})
}
