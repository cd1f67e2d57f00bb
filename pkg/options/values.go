// SPDX-License-Identifier: Apache-2.0

package options

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/flanneld/flanneld/pkg/base/endpoint"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
)

const socketOff = "off"

const (
	logText = "text"
	logJSON = "json"
)

const redacted = "[redacted]"

// Secret is a text that is not shown by formatting and logging.
type Secret string

// Reveal returns the text.
func (s Secret) Reveal() string { return string(s) }

// String returns a placeholder, or "" for an empty secret.
func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return redacted
}

// Format writes the placeholder for any verb.
func (s Secret) Format(f fmt.State, _ rune) { fmt.Fprint(f, s.String()) }

// MarshalText returns the placeholder.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// LogValue returns the placeholder.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// The functions below parse the text of a flag. Their errors contain the expected value, and the
// caller adds the flag and the text. With most of them an empty text is the zero value.

func text(s string) (string, error) { return s, nil }

func secret(s string) (Secret, error) { return Secret(s), nil }

// valid returns v, or an error if it is not what is expected.
func valid[T any](v T, is bool, expected string) (T, error) {
	if !is {
		var none T
		return none, errors.New("expected " + expected)
	}
	return v, nil
}

func path(s string) (string, error) { return valid(s, s != "", "a path") }

func filePath(s string) (string, error) {
	return valid(s, s != "" && !strings.HasSuffix(s, "/"), "the path of a file")
}

func socketText(s string) (string, error) {
	const longest = len(unix.RawSockaddrUnix{}.Path) - 1 // without the NUL at the end
	return valid(s, !strings.HasSuffix(s, "/") && len(s) <= longest,
		fmt.Sprintf("%s or the path of a socket, which has %d characters at most", socketOff, longest))
}

// iface accepts the names that the kernel accepts, and addresses.
func iface(s string) error {
	first, rest, several := strings.Cut(s, ",")
	if a, err := netip.ParseAddr(first); several && err == nil {
		if b, err := netip.ParseAddr(rest); err != nil || a.Is4() == b.Is4() {
			return errors.New("expected an IPv4 and an IPv6 address of one interface, separated by a comma")
		}
		if err := iface(first); err != nil {
			return err
		}
		return iface(rest)
	}

	if a, err := netip.ParseAddr(s); err == nil {
		if a.IsUnspecified() || a.IsMulticast() {
			return errors.New("expected an address that an interface can have")
		}
		return nil
	}

	// As dev_valid_name of the kernel, where 0xa0 is a space too.
	space := func(r rune) bool { return r <= ' ' || r == 0x7f || r == 0xa0 || r == '/' || r == ':' }
	if s == "." || s == ".." || len(s) >= unix.IFNAMSIZ || strings.ContainsFunc(s, space) {
		return fmt.Errorf("expected an IP address or the name of an interface, which has %d characters at most", unix.IFNAMSIZ-1)
	}
	return nil
}

func regex(s string) error {
	_, err := regexp.Compile(s)
	if e, ok := errors.AsType[*syntax.Error](err); ok {
		return fmt.Errorf("expected a regular expression: %s", e.Code)
	}
	return err
}

func annotationPrefix(s string) (string, error) {
	_, err := annotation.Prefix(s)
	return s, err
}

// networkNames ignores empty names, as flannel does.
func networkNames(s string) ([]string, error) {
	var names []string
	for name := range strings.SplitSeq(s, ",") {
		if name = strings.TrimSpace(name); name == "" {
			continue
		}
		if err := subnet.CheckNetworkName(name); err != nil {
			return nil, err
		}
		if slices.Contains(names, name) {
			return nil, fmt.Errorf("network %s is given twice: expected different names", name)
		}
		names = append(names, name)
	}

	if len(names) == 0 {
		return nil, errors.New("expected names of networks, comma separated")
	}
	return names, nil
}

func boolean(s string) (bool, error) {
	b, err := strconv.ParseBool(s)
	return valid(b, err == nil, "true or false")
}

// integer parses a number from lo to hi, both included, in any base of a Go literal. The text of
// describes it, such as "a port".
func integer(s string, lo, hi int64, of string) (int64, error) {
	n, err := strconv.ParseInt(s, 0, 64)
	return valid(n, err == nil && lo <= n && n <= hi, fmt.Sprintf("%s from %d to %d", of, lo, hi))
}

// whole parses a whole number of units from lo to hi, both included.
func whole(unit time.Duration, name string, lo, hi int64) func(string) (time.Duration, error) {
	return func(s string) (time.Duration, error) {
		n, err := integer(s, lo, hi, "a whole number of "+name)
		return time.Duration(n) * unit, err
	}
}

// century is the maximum duration. It has the same effect as any longer one, and cannot
// overflow when it is added to a time or passed to a store.
const century = 100 * 365 * 24 * time.Hour

// duration parses a duration of at least lo.
func duration(lo time.Duration) func(string) (time.Duration, error) {
	return func(s string) (time.Duration, error) {
		d, err := time.ParseDuration(s)
		if err == nil && d > century {
			return valid(d, false, fmt.Sprintf("a duration such as 90s or 5m, at most %.0fh", century.Hours()))
		}
		return valid(d, err == nil && d >= lo, fmt.Sprintf("a duration such as 90s or 5m, at least %s", lo))
	}
}

// port is 0 for a negative number, as with flannel.
func port(s string) (uint16, error) {
	if n, err := strconv.ParseInt(s, 0, 64); err == nil && n < 0 {
		return 0, nil
	}
	n, err := integer(s, 0, 1<<16-1, "a port")
	return uint16(n), err
}

func verbosity(s string) (int, error) {
	n, err := integer(s, 0, 1<<31-1, "a level")
	return int(n), err
}

func oneOf(choices ...string) func(string) (string, error) {
	return func(s string) (string, error) {
		return valid(s, slices.Contains(choices, s), strings.Join(choices, " or "))
	}
}

func address(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	return valid(a.Unmap(), s == "" || err == nil && a.Zone() == "", "an IP address")
}

func destination(s string) (string, error) {
	a, err := address(s)
	if err != nil {
		return "", err
	}
	return valid(s, s == "" || subnet.IsHost(a), "the IP address of another host")
}

// listenAddress parses an address that a program on this host can listen on.
func listenAddress(s string) (netip.Addr, error) {
	a, err := address(s)
	if err != nil {
		return a, err
	}
	return valid(a, s == "" || canListen(a), "an IP address of this host")
}

func canListen(a netip.Addr) bool {
	return subnet.IsHost(a) || a.IsLoopback() || a.IsUnspecified()
}

// unicast parses an address that peers can send to.
func unicast(f prefix.Family) func(string) (netip.Addr, error) {
	return func(s string) (netip.Addr, error) {
		a, err := address(s)
		return valid(a, s == "" || err == nil && prefix.FamilyOf(a) == f && subnet.IsHost(a), fmt.Sprintf("an %s address that peers can reach", f))
	}
}

func publicEndpoint(s string) (endpoint.Named, error) {
	if s == "" {
		return endpoint.Named{}, nil
	}
	e, err := endpoint.Parse(s)
	if err != nil {
		return e, err
	}
	a, err := netip.ParseAddr(e.Host)
	return valid(e, err != nil || subnet.IsHost(a), "a name or address that peers can reach")
}

func location(s string) (string, error) {
	if s == "" {
		return "", nil
	}
	return s, subnet.CheckLocation(s)
}

func label(s string) (string, error) {
	return valid(s, s == "" || len(validation.IsQualifiedName(s)) == 0, "the key of a label, such as topology.kubernetes.io/zone")
}

// endpoints parses a comma separated list of etcd endpoints with one scheme.
func endpoints(s string) ([]string, error) {
	var list []string
	for e := range strings.SplitSeq(s, ",") {
		e = strings.TrimSpace(e)
		list = append(list, e)

		// The text may contain a password, so the errors have the number.
		n := len(list)
		if err := etcdEndpoint(e); err != nil {
			return nil, fmt.Errorf("endpoint %d: %w", n, err)
		}

		// The client uses the scheme of the first endpoint for all.
		if first, this := scheme(list[0]), scheme(e); this != first {
			return nil, fmt.Errorf("endpoint 1 is %s and endpoint %d is %s: expected one scheme for all",
				describeScheme(first), n, describeScheme(this))
		}
	}
	return list, nil
}

// etcdEndpoint checks host:port, with http or https or without, and the path of a socket.
func etcdEndpoint(e string) error {
	malformed := errors.New("expected host:port, or http:// or https:// with host:port")
	host := e
	switch scheme(e) {
	case "http", "https":
		u, err := url.Parse(e)
		if err != nil {
			return malformed
		}
		if u.User != nil {
			return errors.New("expected no user and password in a URL, but --etcd-username and --etcd-password")
		}
		if strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
			return malformed
		}
		host = u.Host

	case "unix", "unixs":
		if _, at, _ := strings.Cut(e, "://"); at == "" {
			return errors.New("expected unix:// with the path of a socket")
		}
		return nil
	}

	name, number, err := net.SplitHostPort(host)
	if err != nil || !isHost(name) || !isPort(number) {
		return malformed
	}
	return nil
}

func isPort(s string) bool {
	n, err := strconv.ParseUint(s, 10, 16)
	return err == nil && n > 0
}

// isHost accepts an address or a DNS name.
func isHost(s string) bool {
	if _, err := netip.ParseAddr(s); err == nil {
		return true
	}

	refused := func(r rune) bool { return r <= ' ' || strings.ContainsRune("/@:%?#[]\\\"", r) }
	labels := strings.Split(strings.TrimSuffix(s, "."), ".")
	for _, l := range labels {
		if l == "" || len(l) > 63 || strings.ContainsFunc(l, refused) {
			return false
		}
	}

	// A number at the end is probably of a mistyped address.
	_, err := strconv.ParseUint(labels[len(labels)-1], 10, 64)
	return err != nil && len(s) <= 254
}

// scheme returns what is before "://", in lower case, or "" if there is none.
func scheme(e string) string {
	if s, _, ok := strings.Cut(e, "://"); ok {
		return strings.ToLower(s)
	}
	return ""
}

func describeScheme(s string) string {
	if s == "" {
		return "without scheme"
	}
	return s
}

func apiURL(s string) (string, error) {
	if s == "" {
		return "", nil
	}

	full := s
	if scheme(s) == "" { // host:port is sufficient for the Kubernetes client
		full = "https://" + s
	}

	u, err := url.Parse(full)
	if err == nil && u.User != nil {
		return "", errors.New("expected no user and password in a URL, but --kubeconfig-file")
	}
	return valid(s, err == nil && (u.Scheme == "http" || u.Scheme == "https") && isHost(u.Hostname()) && (u.Port() == "" || isPort(u.Port())),
		"a URL such as https://host:port")
}

// hostPort parses the IP:port of a listener.
func hostPort(s string) (string, error) {
	a, err := netip.ParseAddrPort(s)
	return valid(s, s == "" || err == nil && a.Port() != 0 && canListen(a.Addr()), "IP:port, such as 127.0.0.1:8287 or [::]:8287")
}

// vmodule checks klog's list of file patterns with a level each.
func vmodule(s string) (string, error) {
	for item := range strings.SplitSeq(s, ",") {
		pattern, level, _ := strings.Cut(item, "=")
		_, bad := filepath.Match(pattern, "")
		if n, err := strconv.Atoi(level); item != "" && (pattern == "" || bad != nil || err != nil || n < 0) {
			return "", errors.New("expected pattern=level, comma separated")
		}
	}
	return s, nil
}

// backtraceAt checks klog's file:line.
func backtraceAt(s string) (string, error) {
	file, line, _ := strings.Cut(s, ":")
	n, err := strconv.Atoi(line)
	return valid(s, s == "" || strings.Contains(file, ".") && err == nil && n > 0, "file.go:line")
}
