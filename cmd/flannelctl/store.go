// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd"
	"github.com/flanneld/flanneld/subnet/kube"
)

// storeFlags are the flags that locate the store. They and their environment variables
// have the same names as the daemon's, except for --network, --context and --net-config-map, which the
// daemon does not have.
type storeFlags struct {
	host    host           // where the store is looked for if no flag locates it
	flags   *pflag.FlagSet // contains the flags that the command offers
	network string
}

// storeOptions are the options of a command, with what only flannelctl has.
type storeOptions struct {
	options.Options
	place              // from which the options are that are not given
	context, configMap string
	kubernetes         bool // the command also works on Kubernetes
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
	s.flags.String(netConfigPath, "", "file with the configuration, on Kubernetes (FLANNELD_NET_CONFIG_PATH)")
	s.flags.String(netConfigMap, "", "ConfigMap with the configuration, on Kubernetes (default "+defaultConfigMap+", unless flanneld's file exists)")
}

// addKubeTo adds the flags for any store: etcd and the Kubernetes API.
func (s *storeFlags) addKubeTo(cmd *cobra.Command) {
	s.addTo(cmd)
	s.flags.Bool("kube-subnet-mgr", false, "the store is the Kubernetes API (FLANNELD_KUBE_SUBNET_MGR)")
	s.flags.String("kubeconfig-file", "", "kubeconfig file for the API (FLANNELD_KUBECONFIG_FILE)")
	s.flags.String("kube-api-url", "", "URL of the API (FLANNELD_KUBE_API_URL)")
	s.flags.String("kube-annotation-prefix", "", "prefix of the annotations (FLANNELD_KUBE_ANNOTATION_PREFIX)")
	s.flags.String("context", "", "context of the kubeconfig")

	complete := func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		path := cmp.Or(s.value("kubeconfig-file"), os.Getenv(options.Variable("kubeconfig-file")))
		return kube.Contexts(path), cobra.ShellCompDirectiveNoFileComp
	}
	_ = cmd.RegisterFlagCompletionFunc("context", complete) // fails only without the flag
}

// addTo adds the flags for etcd to a command and all below it.
func (s *storeFlags) addTo(cmd *cobra.Command) {
	s.flags = cmd.PersistentFlags()
	addNetworkTo(cmd, s.flags, &s.network, s.host)
	s.flags.String("etcd-endpoints", "", "addresses of etcd, comma separated (FLANNELD_ETCD_ENDPOINTS)")
	s.flags.String("etcd-prefix", "", "prefix of all keys (FLANNELD_ETCD_PREFIX)")
	s.flags.String("etcd-cafile", "", "CA bundle for etcd (FLANNELD_ETCD_CAFILE)")
	s.flags.String("etcd-certfile", "", "TLS client certificate (FLANNELD_ETCD_CERTFILE)")
	s.flags.String("etcd-keyfile", "", "key of the TLS client certificate (FLANNELD_ETCD_KEYFILE)")
	s.flags.String("etcd-username", "", "user of etcd (FLANNELD_ETCD_USERNAME)")
}

// value returns the value of a flag, or "" if the command does not have it or its value is the default.
func (s *storeFlags) value(name string) string {
	if f := s.flags.Lookup(name); f != nil && f.Value.String() != f.DefValue {
		return f.Value.String()
	}
	return ""
}

// options returns the options from flags and variables and, unless one of these locates the store, from the place
// where that is found. A flag that is only for Kubernetes implies --kube-subnet-mgr. The password does not
// come from a flag, because flags are visible in the process list.
func (s *storeFlags) options() (storeOptions, error) {
	var args []string
	kubernetes := false
	s.flags.VisitAll(func(f *pflag.Flag) {
		if f.Name == networkFlag || s.value(f.Name) == "" {
			return
		}
		kubernetes = kubernetes || !strings.HasPrefix(f.Name, "etcd")
		if f.Name != "context" && f.Name != netConfigMap {
			args = append(args, "--"+f.Name+"="+f.Value.String())
		}
	})
	if kubernetes {
		args = append(args, "--kube-subnet-mgr")
	}

	found := storeOptions{context: s.value("context"), configMap: s.value(netConfigMap), kubernetes: s.flags.Lookup("kube-subnet-mgr") != nil}
	if !s.located() {
		found.place = s.host.findStore(found.kubernetes)
	}
	needsConfig := s.flags.Lookup(netConfigMap) != nil
	if !needsConfig || found.configMap != "" {
		delete(found.settings, netConfigPath)
	}
	if !needsConfig || s.value(netConfigPath) == "" && os.Getenv("FLANNELD_NET_CONFIG_PATH") == "" && found.settings[netConfigPath] == "" {
		args = append(args, "--"+netConfigPath+"="+os.DevNull) // no file is named, and the file that flanneld reads by default need not exist here
	}

	const password = "etcd-password"
	if s.value("etcd-username") != "" && os.Getenv(options.Variable(password)) == "" && found.settings[password] == "" {
		return found, fmt.Errorf("--etcd-username needs the password in %s: "+
			"it has no flag, because all users see the flags of a process", options.Variable(password))
	}
	var err error
	if found.Options, err = options.Parse(args, append(found.variables(), os.Environ()...)); err != nil || s.network == "" {
		return found, err
	}
	if found.KubeSubnetMgr {
		return found, fmt.Errorf("--%s is for etcd: in Kubernetes there is one network", networkFlag)
	}
	if err := subnet.CheckNetworkName(s.network); err != nil {
		return found, fmt.Errorf("--%s %q is invalid: %w", networkFlag, s.network, err)
	}
	found.Options = found.Network(s.network)
	return found, nil
}

// locating are the flags of flanneld that locate the store.
var locating = []string{"etcd-endpoints", "kubeconfig-file", "kube-api-url", "kube-subnet-mgr"}

// located reports whether a flag or variable locates the store. Then no other place counts: neither may a password
// that is found there reach the server that is named here.
func (s *storeFlags) located() bool {
	return s.value("context") != "" ||
		slices.ContainsFunc(locating, func(name string) bool { return os.Getenv(options.Variable(name)) != "" || s.value(name) != "" })
}

// onKubernetes reports whether the store is the Kubernetes API. It returns false if the
// options are invalid: the next function that needs them returns the error.
func (s *storeFlags) onKubernetes() bool {
	o, err := s.options()
	return err == nil && o.KubeSubnetMgr
}

// store is what commands read from etcd and from the Kubernetes API.
type store interface {
	// Config returns the network configuration, and its revision. The revision is zero if there is none.
	Config(ctx context.Context) (text []byte, revision int64, err error)
	SetConfig(ctx context.Context, text []byte, revision int64) error
	Entries(ctx context.Context, ttl bool) ([]subnet.Entry, error)
	Watch(ctx context.Context, sink func(subnet.Update)) error
}

// read calls f with the store.
func (s *storeFlags) read(f func(storeOptions, store) error) error {
	o, err := s.options()
	if err != nil {
		return err
	}
	return o.read(func(from store) error { return f(o, from) })
}

func (o storeOptions) read(f func(store) error) error {
	if o.KubeSubnetMgr {
		return f(nodes{o})
	}
	return o.withAdmin(func(a *etcd.Admin) error { return f(a) })
}

// withAdmin opens etcd, calls f and closes it. It returns an error on Kubernetes.
func (s *storeFlags) withAdmin(f func(*etcd.Admin) error) error {
	o, err := s.options()
	if err != nil {
		return err
	}
	return o.withAdmin(f)
}

func (o storeOptions) withAdmin(f func(*etcd.Admin) error) error {
	if o.KubeSubnetMgr {
		why := o.Source("kube-subnet-mgr") + " is set"
		if o.name != "" {
			why = "the store is the Kubernetes API, according to " + o.name
		}
		return fmt.Errorf("%s: this command works on etcd; on Kubernetes the API assigns subnets, "+
			"as podCIDRs of Nodes, and the configuration is a ConfigMap", why)
	}
	if err := o.check(o.EtcdEndpoints, o.kubernetes); err != nil {
		return err
	}
	a, err := etcd.NewAdmin(etcd.Config{
		Endpoints: o.EtcdEndpoints, Prefix: o.EtcdPrefix,
		CertFile: o.EtcdCertFile, KeyFile: o.EtcdKeyFile, CAFile: o.EtcdCAFile,
		Username: o.EtcdUsername, Password: o.EtcdPassword.Reveal(),
	})
	if err != nil {
		return err
	}
	return errors.Join(f(a), a.Close())
}

// config returns the network configuration in a store. The error wraps subnet.ErrNoConfig if there is none.
func config(ctx context.Context, from store) ([]byte, int64, error) {
	text, revision, err := from.Config(ctx)
	if err == nil && revision == 0 {
		err = subnet.ErrNoConfig
	}
	return text, revision, err
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

// nodes are the Nodes of a cluster as a store, with the network configuration in a file or ConfigMap.
type nodes struct{ storeOptions }

// Entries returns the leases of all Nodes.
func (n nodes) Entries(ctx context.Context, _ bool) ([]subnet.Entry, error) {
	return kube.Entries(ctx, n.kubeConfig())
}

// Watch calls sink with the leases of all Nodes, and again after every change.
func (n nodes) Watch(ctx context.Context, sink func(subnet.Update)) error {
	return kube.Watch(ctx, n.kubeConfig(), sink)
}

// SetConfig returns an error.
func (nodes) SetConfig(context.Context, []byte, int64) error {
	return errors.New("on Kubernetes the configuration is a ConfigMap: " +
		"kubectl --namespace=kube-flannel edit configmap kube-flannel-cfg changes it")
}

// Config returns the network configuration as daemons on Kubernetes read it: from the
// file or ConfigMap that a flag or variable names; otherwise from the file that flanneld
// reads, which exists in its pod; otherwise from flannel's ConfigMap. The command must
// have the flags of addConfigTo.
func (n nodes) Config(ctx context.Context) (text []byte, revision int64, err error) {
	const some = 1
	if n.NetConfigPath != os.DevNull {
		text, err = os.ReadFile(n.NetConfigPath)
		return text, some, err
	}
	if n.configMap == "" {
		if text, err = os.ReadFile(options.DefaultNetConfigPath); !errors.Is(err, fs.ErrNotExist) {
			return text, some, err
		}
	}

	namespace, name, ok := strings.Cut(cmp.Or(n.configMap, defaultConfigMap), "/")
	if !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
		return nil, 0, fmt.Errorf("--%s %q is invalid: expected NAMESPACE/NAME, such as %s", netConfigMap, n.configMap, defaultConfigMap)
	}
	text, err = kube.NetConfig(ctx, n.kubeConfig(), namespace, name)
	return text, some, err
}
