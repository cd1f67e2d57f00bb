package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"flanneld/cmd/flanneld/app"
	"flanneld/subnet/etcd"
	"flanneld/subnet/kube"
)

// storeFlags say where the store is. They are the daemon's own, as are the
// variables that stand for them.
type storeFlags struct {
	values map[string]*string
	kube   *bool
	// configMap holds the network configuration on Kubernetes; nil where nobody
	// asks for that.
	configMap *string
}

const (
	netConfigPath = "net-config-path"
	netConfigMap  = "net-config-map"
	// defaultConfigMap is the one of flannel's manifests.
	defaultConfigMap = "kube-flannel/kube-flannel-cfg"
)

// addConfigTo adds the flags for the network configuration, wherever it is.
func (s *storeFlags) addConfigTo(cmd *cobra.Command) {
	s.addKubeTo(cmd)
	s.values[netConfigPath] = cmd.PersistentFlags().String(netConfigPath, "", "file with the configuration, on Kubernetes (FLANNELD_NET_CONFIG_PATH)")
	s.configMap = cmd.PersistentFlags().String(netConfigMap, "",
		"ConfigMap with the configuration, on Kubernetes (default "+defaultConfigMap+", unless flanneld's file is there)")
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
		args = append(args, "--"+netConfigPath+"="+os.DevNull) // it need not be on this machine
	}
	return app.Parse(args, os.Environ())
}

// onKubernetes reports whether the store is the Kubernetes API.
func (s *storeFlags) onKubernetes() bool {
	o, err := s.options()
	return err == nil && o.KubeSubnetMgr
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

// kubeConfig is what kube needs of o.
func kubeConfig(o app.Options) kube.Config {
	return kube.Config{APIURL: o.KubeAPIURL, Kubeconfig: o.KubeconfigFile, AnnotationPrefix: o.KubeAnnotationPrefix}
}

// netConfig returns the network configuration as daemons on Kubernetes have it:
// the file or the ConfigMap that is named, else the file that flanneld reads
// where it is there, which is so in its pod, else the ConfigMap.
func (s *storeFlags) netConfig(ctx context.Context, o app.Options) ([]byte, error) {
	if o.NetConfigPath != os.DevNull {
		return os.ReadFile(o.NetConfigPath)
	}
	name := *s.configMap
	if name == "" {
		text, err := os.ReadFile(app.DefaultNetConfigPath)
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
