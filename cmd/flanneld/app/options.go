package app

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"flanneld/pkg/status"
)

// The values of --nexthop-objects.
const (
	nexthopsAuto = "auto"
	nexthopsOff  = "off"
)

// The values of --firewall.
const (
	firewallConfig   = "config"
	firewallAuto     = "auto"
	firewallIPTables = "iptables"
	firewallNFTables = "nftables"
)

// allowExtension is the flag whose default depends on another.
const allowExtension = "allow-extension-backend"

// socketOff is the value of --status-socket for none.
const socketOff = "off"

// Options is everything that flags and FLANNELD_ variables can say, validated.
// It holds no secret that formatting it would show.
type Options struct {
	// EtcdEndpoints is where etcd is: host:port or URLs, all of one scheme.
	EtcdEndpoints []string
	// EtcdPrefix is the directory of all keys, as given.
	EtcdPrefix string
	// EtcdKeyFile and EtcdCertFile are the TLS client key and certificate:
	// both or neither. EtcdCAFile is the CA bundle; empty means the system's.
	EtcdKeyFile, EtcdCertFile, EtcdCAFile string
	// EtcdUsername and EtcdPassword are both set or both empty.
	EtcdUsername string
	EtcdPassword Secret
	// RenewMargin is how long before its end the lease is renewed.
	RenewMargin time.Duration
	// LeaseTTL is how long the lease lives in the store unless it is renewed.
	LeaseTTL time.Duration

	// KubeSubnetMgr says that the Kubernetes API is the store, not etcd.
	KubeSubnetMgr bool
	// KubeAPIURL and KubeconfigFile say how to reach the API server; both
	// empty means by the service account of the pod.
	KubeAPIURL, KubeconfigFile string
	// NodeName is the Node of this host in Kubernetes, by NODE_NAME. Empty means
	// that the pod knows, which POD_NAME and POD_NAMESPACE name.
	NodeName, PodName, PodNamespace string
	// KubeAnnotationPrefix is the prefix of the node annotations.
	KubeAnnotationPrefix string
	// NetConfigPath is the file with the network configuration.
	NetConfigPath string
	// SetNodeNetworkUnavailable says to clear that condition of the node.
	SetNodeNetworkUnavailable bool

	// Iface and IfaceRegex are what to look for, in order.
	Iface, IfaceRegex []string
	// IfaceCanReach is the IP address to reach; empty if not given.
	IfaceCanReach string
	// IfaceWait bounds how long to wait for an interface at the start.
	IfaceWait time.Duration
	// PublicIP and PublicIPv6 are what peers send to; zero if not given.
	PublicIP, PublicIPv6 netip.Addr

	// IPMasq says to masquerade what leaves the network, with random ports
	// unless IPMasqFullyRandomDisable says otherwise.
	IPMasq, IPMasqFullyRandomDisable bool
	// IPTablesForwardRules says to accept what is forwarded for the network.
	IPTablesForwardRules bool
	// GuardTunnel says to drop what pods send to the tunnels of hosts.
	GuardTunnel bool
	// IPTablesResync is the period in which the rules are looked at again.
	IPTablesResync time.Duration
	// IPBlackholeRoute says to keep a blackhole route for the own subnet.
	IPBlackholeRoute bool
	// Firewall is "config", "auto", "iptables" or "nftables".
	Firewall string
	// Resync is the period in which all kernel state is read again.
	Resync time.Duration

	// ExitOnConfigChange ends the daemon when there is another configuration.
	ExitOnConfigChange bool
	// NexthopObjects is "auto" or "off".
	NexthopObjects string

	// AllowExtensionBackend says that commands of the network configuration
	// may be run.
	AllowExtensionBackend bool
	// UDPSourceCheck is "strict", "network" or "off": a tunnel.SourceCheck.
	UDPSourceCheck string
	// UDPPersist keeps the TUN device of the udp backend when the daemon ends.
	UDPPersist bool

	// SubnetFile is the file that is written for the CNI plugin.
	SubnetFile string
	// StateDir is the directory of the last known state.
	StateDir string

	// HealthzIP and HealthzPort are where probes are answered. The zero
	// address is every address, port 0 is nowhere.
	HealthzIP   netip.Addr
	HealthzPort uint16
	// ReadyzDatastoreGrace is how long the store may be away before the
	// daemon is not ready.
	ReadyzDatastoreGrace time.Duration

	// StatusSocket is the path of the local socket; empty means beside the
	// subnet file, "off" none.
	StatusSocket string
	// StatuszAddress is where the status page is shown to other hosts, as
	// address:port; empty means nowhere.
	StatuszAddress string

	// LogFormat is "text" or "json".
	LogFormat string
	// Verbosity, VModule and LogBacktraceAt are klog's v, vmodule and
	// log_backtrace_at.
	Verbosity               int
	VModule, LogBacktraceAt string

	// Warnings has one line for each thing that was ignored and looks like a
	// mistake.
	Warnings []string

	version bool
	sources map[string]string // name of the flag: how it was given
}

// Source returns how the flag was given: "--ip-masq" or "FLANNELD_IP_MASQ". A
// flag that was not given is named as a flag.
func (o Options) Source(name string) string {
	if s, ok := o.sources[name]; ok {
		return s
	}
	return "--" + name
}

// HealthzAddr returns the address to answer probes at, "address:port"; empty
// if they are not to be answered.
func (o Options) HealthzAddr() string {
	if o.HealthzPort == 0 {
		return ""
	}
	host := ""
	if o.HealthzIP.IsValid() {
		host = o.HealthzIP.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(int(o.HealthzPort)))
}

// socketPath returns the path of the local socket; empty if there is to be none.
func (o Options) socketPath() string {
	switch o.StatusSocket {
	case "":
		return status.SocketPath(o.SubnetFile)
	case socketOff:
		return ""
	}
	return o.StatusSocket
}

// storeKind names the datastore.
func (o Options) storeKind() string {
	if o.KubeSubnetMgr {
		return "kubernetes"
	}
	return "etcd"
}

// LogValues returns the flags that were given and their values, as key-value
// pairs for the logger. Secrets are redacted.
func (o Options) LogValues() []any {
	var kv []any
	for _, t := range topics() {
		for _, s := range t.settings {
			if _, given := o.sources[s.name]; given {
				kv = append(kv, s.name, s.get(o))
			}
		}
	}
	return kv
}

// DefaultNetConfigPath is where the network configuration is on Kubernetes unless
// told otherwise: where flannel's manifests mount its ConfigMap.
const DefaultNetConfigPath = "/etc/kube-flannel/net-conf.json"

// given is one flag that holds text, by name and value.
type given struct{ name, value string }

// check holds the values against each other and the file system.
func (o *Options) check() error {
	if _, given := o.sources[allowExtension]; !given {
		// Who may write to etcd is trusted with the network as a whole. In
		// Kubernetes many may write a node's annotations or a ConfigMap.
		o.AllowExtensionBackend = !o.KubeSubnetMgr
	}
	for _, pair := range [][2]given{
		{{"etcd-username", o.EtcdUsername}, {"etcd-password", o.EtcdPassword.Reveal()}},
		{{"etcd-keyfile", o.EtcdKeyFile}, {"etcd-certfile", o.EtcdCertFile}},
	} {
		if err := o.together(pair[0], pair[1]); err != nil {
			return err
		}
	}
	files := []given{
		{"etcd-keyfile", o.EtcdKeyFile}, {"etcd-certfile", o.EtcdCertFile}, {"etcd-cafile", o.EtcdCAFile},
		{"kubeconfig-file", o.KubeconfigFile},
	}
	if o.KubeSubnetMgr {
		files = append(files, given{"net-config-path", o.NetConfigPath})
	}
	for _, f := range files {
		if err := o.readable(f); err != nil {
			return err
		}
	}
	for _, f := range []given{{"subnet-file", o.SubnetFile}, {"status-socket", o.StatusSocket}} {
		if info, err := os.Stat(f.value); err == nil && info.IsDir() {
			return fmt.Errorf("%s %q is a directory: expected a file", o.Source(f.name), f.value)
		}
	}
	if info, err := os.Stat(o.StateDir); err == nil && !info.IsDir() {
		return fmt.Errorf("%s %q is a file: expected a directory", o.Source("state-dir"), o.StateDir)
	}
	if o.LogFormat == logJSON && o.LogBacktraceAt != "" {
		return fmt.Errorf("%s works with text logs only: expected %s text",
			o.Source("log_backtrace_at"), o.Source("log-format"))
	}
	tls := o.EtcdCertFile != "" || o.EtcdCAFile != ""
	if tls && !o.KubeSubnetMgr && scheme(o.EtcdEndpoints[0]) == "http" {
		o.Warnings = append(o.Warnings, "the TLS files for etcd are not used: "+
			o.Source("etcd-endpoints")+" names http endpoints")
	}
	return nil
}

// together refuses one of two flags without the other.
func (o *Options) together(a, b given) error {
	if b.value != "" {
		a, b = b, a
	}
	if a.value != "" && b.value == "" {
		return fmt.Errorf("%s is set and --%s is not: expected both or neither", o.Source(a.name), b.name)
	}
	return nil
}

// readable refuses a file that was named and cannot be read. It does not open
// the file, which may be a pipe.
func (o *Options) readable(f given) error {
	if f.value == "" {
		return nil
	}
	info, err := os.Stat(f.value)
	if err == nil {
		if info.IsDir() {
			return fmt.Errorf("%s %q is a directory: expected a file", o.Source(f.name), f.value)
		}
		err = unix.Access(f.value, unix.R_OK)
	}
	if err == nil {
		return nil
	}
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		err = pe.Err // the path is named already
	}
	return fmt.Errorf("%s %q cannot be read: %w", o.Source(f.name), f.value, err)
}
