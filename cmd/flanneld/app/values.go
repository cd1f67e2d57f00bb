package app

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// redacted stands for a secret wherever one is formatted.
const redacted = "[redacted]"

// Secret is text that formatting and logging do not show.
type Secret string

// Reveal returns the text.
func (s Secret) Reveal() string { return string(s) }

// String returns a placeholder; nothing for an empty secret.
func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return redacted
}

// Format writes the placeholder, whatever the verb.
func (s Secret) Format(f fmt.State, _ rune) { fmt.Fprint(f, s.String()) }

// MarshalText returns the placeholder.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// LogValue returns the placeholder.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// The functions below turn the text of a flag into its value. Their errors
// say what was expected: the caller names the flag and the text.

func text(s string) (string, error) { return s, nil }

func secret(s string) (Secret, error) { return Secret(s), nil }

func path(s string) (string, error) {
	if s == "" {
		return "", errors.New("expected a path")
	}
	return s, nil
}

func boolean(s string) (bool, error) {
	b, err := strconv.ParseBool(s)
	if err != nil {
		return false, errors.New("expected true or false")
	}
	return b, nil
}

// integer accepts a Go literal of any base between lo and hi.
func integer(s string, lo, hi int64, of string) (int64, error) {
	n, err := strconv.ParseInt(s, 0, 64)
	if err != nil || n < lo || n > hi {
		return 0, fmt.Errorf("expected %s from %d to %d", of, lo, hi)
	}
	return n, nil
}

// whole returns the parser of a number of units between lo and hi.
func whole(unit time.Duration, name string, lo, hi int64) func(string) (time.Duration, error) {
	return func(s string) (time.Duration, error) {
		n, err := integer(s, lo, hi, "a whole number of "+name)
		return time.Duration(n) * unit, err
	}
}

// duration returns the parser of a duration of at least lo.
func duration(lo time.Duration) func(string) (time.Duration, error) {
	return func(s string) (time.Duration, error) {
		d, err := time.ParseDuration(s)
		if err != nil || d < lo {
			return 0, fmt.Errorf("expected a duration such as 90s or 5m, at least %s", lo)
		}
		return d, nil
	}
}

// port takes a negative number for 0, as flannel does.
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
		if !slices.Contains(choices, s) {
			return "", errors.New("expected " + strings.Join(choices, " or "))
		}
		return s, nil
	}
}

// address parses an IP address. Empty text is the zero address.
func address(s string) (netip.Addr, error) {
	if s == "" {
		return netip.Addr{}, nil
	}
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" {
		return netip.Addr{}, errors.New("expected an IP address")
	}
	return a.Unmap(), nil
}

// addressText checks the text of an IP address.
func addressText(s string) (string, error) {
	_, err := address(s)
	return s, err
}

// unicast returns the parser of an address that peers can send to. Empty text
// is the zero address.
func unicast(v4 bool) func(string) (netip.Addr, error) {
	want := "expected an IPv6 address that peers can reach"
	if v4 {
		want = "expected an IPv4 address that peers can reach"
	}
	return func(s string) (netip.Addr, error) {
		a, err := address(s)
		if s != "" && (err != nil || a.Is4() != v4 || a.IsUnspecified() || a.IsMulticast()) {
			return netip.Addr{}, errors.New(want)
		}
		return a, nil
	}
}

// endpoints parses a comma separated list of etcd endpoints. They must share a
// scheme, because the client takes that of the first for all. Errors number
// the endpoints: their text may hold a password.
func endpoints(s string) ([]string, error) {
	var list []string
	for e := range strings.SplitSeq(s, ",") {
		e = strings.TrimSpace(e)
		list = append(list, e)
		n := len(list)
		if err := endpoint(e); err != nil {
			return nil, fmt.Errorf("endpoint %d: %w", n, err)
		}
		if first, this := scheme(list[0]), scheme(e); this != first {
			return nil, fmt.Errorf("endpoint 1 is %s and endpoint %d is %s: expected one scheme for all",
				describeScheme(first), n, describeScheme(this))
		}
	}
	return list, nil
}

// endpoint checks one etcd endpoint.
func endpoint(e string) error {
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
		return nil
	}
	name, number, err := net.SplitHostPort(host)
	if err != nil || name == "" || strings.ContainsAny(name, "/@ ") {
		return malformed
	}
	if n, err := strconv.ParseUint(number, 10, 16); err != nil || n == 0 {
		return malformed
	}
	return nil
}

// scheme is the part of an endpoint before "://"; empty if it has none.
func scheme(endpoint string) string {
	if s, _, ok := strings.Cut(endpoint, "://"); ok {
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

// apiURL parses the URL of the Kubernetes API server. Empty text is none.
func apiURL(s string) (string, error) {
	if s == "" {
		return "", nil
	}
	full := s
	if scheme(s) == "" { // host:port is enough for the Kubernetes client
		full = "https://" + s
	}
	u, err := url.Parse(full)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", errors.New("expected a URL such as https://host:port")
	}
	if u.User != nil {
		return "", errors.New("expected no user and password in a URL, but --kubeconfig-file")
	}
	return s, nil
}

// hostPort parses the address of a listener, "IP:port". Empty text is none.
func hostPort(s string) (string, error) {
	if s == "" {
		return "", nil
	}
	if a, err := netip.ParseAddrPort(s); err != nil || a.Port() == 0 {
		return "", errors.New("expected IP:port, such as 127.0.0.1:8287 or [::]:8287")
	}
	return s, nil
}

// vmodule checks klog's list of file patterns with a level each.
func vmodule(s string) (string, error) {
	for item := range strings.SplitSeq(s, ",") {
		pattern, level, _ := strings.Cut(item, "=")
		if n, err := strconv.Atoi(level); item != "" && (pattern == "" || err != nil || n < 0) {
			return "", errors.New("expected pattern=level, comma separated")
		}
	}
	return s, nil
}

// backtraceAt checks klog's file:line.
func backtraceAt(s string) (string, error) {
	file, line, _ := strings.Cut(s, ":")
	if n, err := strconv.Atoi(line); s != "" && (!strings.Contains(file, ".") || err != nil || n <= 0) {
		return "", errors.New("expected file.go:line")
	}
	return s, nil
}
