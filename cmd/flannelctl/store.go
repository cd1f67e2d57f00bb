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
	host    host // where the store is looked for if no flag locates it
	values  map[string]*string
	network *string
	kube    *bool
	// configMap is the value of the flag that names the ConfigMap with the network
	// configuration on Kubernetes. It is nil for commands without that flag.
	configMap *string
	// context is the value of the flag for the context of the kubeconfig. It is nil for commands that work on
	// etcd only.
	context *string
}

// storeOptions are the options of a command, with what only flannelctl has.
type storeOptions struct {
	options.Options
	place   // from which the options are that are not given
	context string
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
		{"kubeconfig-file", "kubeconfig file for the API (FLANNELD_KUBECONFIG_FILE)"},
		{"kube-api-url", "URL of the API (FLANNELD_KUBE_API_URL)"},
		{"kube-annotation-prefix", "prefix of the annotations (FLANNELD_KUBE_ANNOTATION_PREFIX)"},
	} {
		s.values[f[0]] = cmd.PersistentFlags().String(f[0], "", f[1])
	}
	s.context = cmd.PersistentFlags().String("context", "", "context of the kubeconfig")
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

// options returns the options from flags and variables and, unless one of these locates the store, from the place
// where that is found. A flag that is only for Kubernetes implies --kube-subnet-mgr. The password does not
// come from a flag, because flags are visible in the process list.
func (s *storeFlags) options() (storeOptions, error) {
	var args []string
	kubernetes := s.kube != nil && *s.kube || s.configMap != nil && *s.configMap != "" || s.context != nil && *s.context != ""
	for name, value := range s.values {
		if *value == "" {
			continue
		}
		args = append(args, "--"+name+"="+*value)
		kubernetes = kubernetes || !strings.HasPrefix(name, "etcd")
	}
	if kubernetes {
		args = append(args, "--kube-subnet-mgr")
	}

	var found storeOptions
	if s.context != nil {
		found.context = *s.context
	}
	if !s.located() {
		found.place = s.host.findStore(s.kube != nil)
	}
	if s.configMap == nil || *s.configMap != "" {
		delete(found.settings, netConfigPath)
	}
	if s.configMap == nil || *s.values[netConfigPath] == "" && os.Getenv("FLANNELD_NET_CONFIG_PATH") == "" && found.settings[netConfigPath] == "" {
		args = append(args, "--"+netConfigPath+"="+os.DevNull) // no file is named, and the file that flanneld reads by default need not exist here
	}

	var err error
	if found.Options, err = options.Parse(args, append(found.variables(), os.Environ()...)); err != nil || *s.network == "" {
		return found, err
	}
	if found.KubeSubnetMgr {
		return found, fmt.Errorf("--%s is for etcd: in Kubernetes there is one network", networkFlag)
	}
	if err := subnet.CheckNetworkName(*s.network); err != nil {
		return found, fmt.Errorf("--%s %q is invalid: %w", networkFlag, *s.network, err)
	}
	found.Options = found.Network(*s.network)
	return found, nil
}

// locating are the flags of flanneld that locate the store.
var locating = []string{"etcd-endpoints", "kubeconfig-file", "kube-api-url", "kube-subnet-mgr"}

// located reports whether a flag or variable locates the store. Then no other place counts: neither may a password
// that is found there reach the server that is named here.
func (s *storeFlags) located() bool {
	for _, name := range locating {
		if os.Getenv(options.Variable(name)) != "" || s.values[name] != nil && *s.values[name] != "" {
			return true
		}
	}
	return s.kube != nil && *s.kube || s.context != nil && *s.context != ""
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
		why := o.Source("kube-subnet-mgr") + " is set"
		if o.name != "" {
			why = "the store is the Kubernetes API, according to " + o.name
		}
		return nil, fmt.Errorf("%s: this command works on etcd; on Kubernetes the API assigns subnets, "+
			"as podCIDRs of Nodes, and the configuration is a ConfigMap", why)
	}
	if err := o.check(o.EtcdEndpoints, s.kube != nil); err != nil {
		return nil, err
	}
	return o.openEtcd()
}

func (o storeOptions) openEtcd() (*etcd.Admin, error) {
	return etcd.NewAdmin(etcd.Config{
		Endpoints: o.EtcdEndpoints, Prefix: o.EtcdPrefix,
		CertFile: o.EtcdCertFile, KeyFile: o.EtcdKeyFile, CAFile: o.EtcdCAFile,
		Username: o.EtcdUsername, Password: o.EtcdPassword.Reveal(),
	})
}

// kubeConfig returns what package kube needs.
func (o storeOptions) kubeConfig() kube.Config {
	c := kube.Config{APIURL: o.KubeAPIURL, Kubeconfig: o.KubeconfigFile, AnnotationPrefix: o.KubeAnnotationPrefix, Context: o.context}
	if c.APIURL == "" && c.Kubeconfig == "" && o.serviceAccount != "" {
		c.APIURL = o.apiURL
		c.ServiceAccount = o.serviceAccount
	}
	return c
}

// netConfig returns the network configuration as daemons on Kubernetes read it: from the
// file or ConfigMap that a flag or variable names; otherwise from the file that flanneld
// reads, which exists in its pod; otherwise from flannel's ConfigMap. The command must
// have the flags of addConfigTo.
func (s *storeFlags) netConfig(ctx context.Context, o storeOptions) ([]byte, error) {
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
	return kube.NetConfig(ctx, o.kubeConfig(), namespace, name)
}
