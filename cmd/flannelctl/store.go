// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/flanneld/flanneld/pkg/options"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
	"github.com/flanneld/flanneld/subnet/kube"
)

// storeFlags are the flags that locate the store. They and their environment variables
// have the same names as the daemon's, except for --network and --net-config-map, which the
// daemon does not have.
type storeFlags struct {
	values  map[string]*string
	network *string
	kube    *bool
	// configMap is the value of the flag that names the ConfigMap with the network
	// configuration on Kubernetes. It is nil for commands without that flag.
	configMap *string
}

const (
	netConfigPath = "net-config-path"
	netConfigMap  = "net-config-map"
	// defaultConfigMap is the ConfigMap of flannel's manifests.
	defaultConfigMap = "kube-flannel/kube-flannel-cfg"
)

// addConfigTo adds the flags for any store, and those that locate the network
// configuration on Kubernetes.
func (s *storeFlags) addConfigTo(cmd *cobra.Command) {
	s.addKubeTo(cmd)
	s.values[netConfigPath] = cmd.PersistentFlags().String(netConfigPath, "", "file with the configuration, on Kubernetes (FLANNELD_NET_CONFIG_PATH)")
	s.configMap = cmd.PersistentFlags().String(netConfigMap, "",
		"ConfigMap with the configuration, on Kubernetes (default "+defaultConfigMap+", unless flanneld's file exists)")
}

// addKubeTo adds the flags for any store: etcd and the Kubernetes API.
func (s *storeFlags) addKubeTo(cmd *cobra.Command) {
	s.addTo(cmd)
	s.kube = cmd.PersistentFlags().Bool("kube-subnet-mgr", false, "the store is the Kubernetes API (FLANNELD_KUBE_SUBNET_MGR)")
	for _, f := range [][2]string{
		{"kubeconfig-file", "kubeconfig file for the API; by default the pod's service account is used (FLANNELD_KUBECONFIG_FILE)"},
		{"kube-api-url", "URL of the API (FLANNELD_KUBE_API_URL)"},
		{"kube-annotation-prefix", "prefix of the annotations (FLANNELD_KUBE_ANNOTATION_PREFIX)"},
	} {
		s.values[f[0]] = cmd.PersistentFlags().String(f[0], "", f[1])
	}
}

// addTo adds the flags for etcd to a command and all below it.
func (s *storeFlags) addTo(cmd *cobra.Command) {
	s.values, s.network = map[string]*string{}, addNetworkTo(cmd)
	for _, f := range [][2]string{
		{"etcd-endpoints", "addresses of etcd, comma separated (FLANNELD_ETCD_ENDPOINTS)"},
		{"etcd-prefix", "prefix of all keys (FLANNELD_ETCD_PREFIX)"},
		{"etcd-cafile", "CA bundle for etcd (FLANNELD_ETCD_CAFILE)"},
		{"etcd-certfile", "TLS client certificate (FLANNELD_ETCD_CERTFILE)"},
		{"etcd-keyfile", "key of the TLS client certificate (FLANNELD_ETCD_KEYFILE)"},
		{"etcd-username", "user of etcd (FLANNELD_ETCD_USERNAME)"},
	} {
		s.values[f[0]] = cmd.PersistentFlags().String(f[0], "", f[1])
	}
}

// options returns the options from flags and variables. A flag that is only for
// Kubernetes implies --kube-subnet-mgr. The password comes only from
// FLANNELD_ETCD_PASSWORD, because flags are visible in the process list.
func (s *storeFlags) options() (options.Options, error) {
	var args []string
	kubernetes := false
	for name, value := range s.values {
		if *value == "" {
			continue
		}
		args = append(args, "--"+name+"="+*value)
		kubernetes = kubernetes || !strings.HasPrefix(name, "etcd")
	}
	kubernetes = kubernetes || s.kube != nil && *s.kube || s.configMap != nil && *s.configMap != ""
	if kubernetes {
		args = append(args, "--kube-subnet-mgr")
	}
	if s.configMap == nil || *s.values[netConfigPath] == "" && os.Getenv("FLANNELD_NET_CONFIG_PATH") == "" {
		args = append(args, "--"+netConfigPath+"="+os.DevNull) // no file is named, and the file that flanneld reads by default need not exist here
	}
	o, err := options.Parse(args, os.Environ())
	if err != nil || *s.network == "" {
		return o, err
	}
	if o.KubeSubnetMgr {
		return o, fmt.Errorf("--%s is for etcd: in Kubernetes there is one network", networkFlag)
	}
	if err := subnet.CheckNetworkName(*s.network); err != nil {
		return o, fmt.Errorf("--%s %q is invalid: %w", networkFlag, *s.network, err)
	}
	return o.Network(*s.network), nil
}

// onKubernetes reports whether the store is the Kubernetes API. It returns false if the
// options are invalid: the next function that needs them returns the error.
func (s *storeFlags) onKubernetes() bool {
	o, err := s.options()
	return err == nil && o.KubeSubnetMgr
}

// admin opens etcd. It returns an error if the store is the Kubernetes API.
func (s *storeFlags) admin() (*etcd.Admin, error) {
	o, err := s.options()
	if err != nil {
		return nil, err
	}
	if o.KubeSubnetMgr {
		return nil, fmt.Errorf("%s is set: this command works on etcd; on Kubernetes the API assigns subnets, "+
			"as podCIDRs of Nodes, and the configuration is a ConfigMap", o.Source("kube-subnet-mgr"))
	}
	return etcd.NewAdmin(etcd.Config{
		Endpoints: o.EtcdEndpoints, Prefix: o.EtcdPrefix,
		CertFile: o.EtcdCertFile, KeyFile: o.EtcdKeyFile, CAFile: o.EtcdCAFile,
		Username: o.EtcdUsername, Password: o.EtcdPassword.Reveal(),
	})
}

// kubeConfig returns the options that package kube needs.
func kubeConfig(o options.Options) kube.Config {
	return kube.Config{APIURL: o.KubeAPIURL, Kubeconfig: o.KubeconfigFile, AnnotationPrefix: o.KubeAnnotationPrefix}
}

// netConfig returns the network configuration as daemons on Kubernetes read it: from the
// file or ConfigMap that a flag or variable names; otherwise from the file that flanneld
// reads, which exists in its pod; otherwise from flannel's ConfigMap. The command must
// have the flags of addConfigTo.
func (s *storeFlags) netConfig(ctx context.Context, o options.Options) ([]byte, error) {
	if o.NetConfigPath != os.DevNull {
		return os.ReadFile(o.NetConfigPath)
	}
	name := *s.configMap
	if name == "" {
		text, err := os.ReadFile(options.DefaultNetConfigPath)
		if !errors.Is(err, fs.ErrNotExist) {
			return text, err
		}
		name = defaultConfigMap
	}
	namespace, name, ok := strings.Cut(name, "/")
	if !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
		return nil, fmt.Errorf("--%s %q is invalid: expected NAMESPACE/NAME, such as %s", netConfigMap, *s.configMap, defaultConfigMap)
	}
	return kube.NetConfig(ctx, kubeConfig(o), namespace, name)
}
