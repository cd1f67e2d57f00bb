// SPDX-License-Identifier: Apache-2.0

package access

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud"
)

const (
	sessionTime = 6 * time.Hour
	reserve     = 5 * time.Minute // keys and sessions are replaced this long before they end; the next keys exist 30 minutes before
)

// ErrUndefined means that the metadata service does not have a value.
var ErrUndefined = errors.New("the value does not exist")

// Metadata is the metadata service of an instance. Only one goroutine at a time may use it.
type Metadata struct {
	Cloud string // for errors, such as Alibaba Cloud
	Page  string // path of the documentation page with the policy of the role
	URL   string // without a path
	Roles string // path of the value that lists the role of the instance, such as ram/security-credentials/
	Token string // path of a token, if the service has one in place of the keys of a role
	// Root is the path of the values below URL; empty means latest/meta-data/.
	Root string
	// Flavor is the value of the header Metadata-Flavor; empty if the service does not require it.
	Flavor string
	HTTP   *http.Client // nil means NewDirect
	// Session is the name of the header that contains the id of a session with the service. The name of the
	// header that opens a session begins with it. Session is empty if the service has no sessions.
	Session string

	session string
	ends    time.Time // when the session must not be used any more
	keys    Keys
	until   time.Time // when the keys must not be used any more
}

// Read returns the value at a path below Root. The error wraps ErrUndefined if there is no such
// value.
func (m *Metadata) Read(ctx context.Context, path string) (string, error) {
	text, err := m.read(ctx, path)
	if err != nil {
		return "", fmt.Errorf("read %s from the metadata service of %s: %w", path, m.Cloud, err)
	}
	return text, nil
}

// Fill reads the values at paths into to, which has as many elements, until one cannot be read.
func (m *Metadata) Fill(ctx context.Context, paths []string, to ...*string) (err error) {
	for i, path := range paths {
		if *to[i], err = m.Read(ctx, path); err != nil {
			return err
		}
	}
	return nil
}

func (m *Metadata) read(ctx context.Context, path string) (string, error) {
	if err := m.open(ctx); err != nil {
		return "", err
	}
	header := http.Header{}
	if m.session != "" {
		header.Set(m.Session, m.session)
	}
	if m.Flavor != "" {
		header.Set("Metadata-Flavor", m.Flavor)
	}

	status, text, err := m.send(ctx, http.MethodGet, cmp.Or(m.Root, "latest/meta-data/")+path, header)
	if err != nil {
		return "", err
	}
	if status == http.StatusNotFound {
		return "", ErrUndefined
	}
	if status != http.StatusOK {
		m.session = "" // it may have been refused
		return "", fmt.Errorf("%w: status %d", cloud.ErrUnavailable, status)
	}
	if text == "" {
		return "", fmt.Errorf("%w: the answer is empty", cloud.ErrUnavailable)
	}
	return text, nil
}

// open opens a session with the service, which may require one, unless one is open.
func (m *Metadata) open(ctx context.Context) error {
	if m.Session == "" || m.session != "" && time.Now().Before(m.ends) {
		return nil
	}

	header := http.Header{}
	header.Set(m.Session+"-ttl-seconds", fmt.Sprint(int(sessionTime.Seconds())))
	status, text, err := m.send(ctx, http.MethodPut, "latest/api/token", header)
	if err != nil {
		return err
	}

	// A service that refuses to open a session works without.
	m.session = ""
	if status == http.StatusOK {
		m.session = text
		m.ends = time.Now().Add(sessionTime - reserve)
	}
	return nil
}

func (m *Metadata) send(ctx context.Context, method, path string, header http.Header) (status int, text string, err error) {
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(m.URL, "/")+"/"+path, nil)
	if err != nil {
		return 0, "", errors.New("the address of the service is invalid")
	}
	req.Header = header
	status, body, err := Send(cmp.Or(m.HTTP, NewDirect()), req)
	return status, strings.TrimSpace(string(body)), err
}

// ReadAddresses returns the addresses in a value, which is a list in JSON or in lines. It returns nil if
// the value does not exist.
func (m *Metadata) ReadAddresses(ctx context.Context, path string) ([]netip.Addr, error) {
	text, err := m.Read(ctx, path)
	if errors.Is(err, ErrUndefined) {
		return nil, nil
	}
	return addresses(text), err
}

func addresses(text string) []netip.Addr {
	return Addresses(strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune("[]\", \t\r\n/", r) })...)
}

// Interface is a network interface of the instance.
type Interface struct {
	MAC     string
	Primary bool
	Address netip.Addr // the address by which Find has found the interface
}

// Path returns the path of a value of the interface.
func (i Interface) Path(name string) string { return "network/interfaces/macs/" + i.MAC + "/" + name }

// Find returns the first network interface that has one of the wanted addresses, or an error if none has.
// names are the values of an interface that contain its addresses, such as private-ipv4s.
func (m *Metadata) Find(ctx context.Context, wanted []netip.Addr, names ...string) (Interface, error) {
	primary, err := m.Read(ctx, "mac")
	if err != nil {
		return Interface{}, err
	}
	list, err := m.Read(ctx, "network/interfaces/macs/")
	if err != nil {
		return Interface{}, err
	}

	for line := range strings.FieldsSeq(list) {
		i := Interface{MAC: strings.TrimSuffix(line, "/")}
		i.Primary = strings.EqualFold(i.MAC, primary)
		for _, name := range names {
			have, err := m.ReadAddresses(ctx, i.Path(name))
			if err != nil {
				return Interface{}, err
			}
			if at := slices.IndexFunc(have, func(a netip.Addr) bool { return slices.Contains(wanted, a) }); at >= 0 {
				i.Address = have[at]
				return i, nil
			}
		}
	}
	return Interface{}, fmt.Errorf("no network interface of this instance has an address of the external interface: the metadata service of %s does not know %v", m.Cloud, wanted)
}

// Keys returns the keys of the role of the instance, or an error if the instance has no role. It keeps the
// keys until shortly before they end. With Token they consist of a token alone. Keys is a Provider.
func (m *Metadata) Keys(ctx context.Context) (Keys, error) {
	if m.keys != (Keys{}) && time.Now().Before(m.until) {
		return m.keys, nil
	}

	path, what := m.Token, "token"
	if path == "" {
		role, err := m.Read(ctx, m.Roles)
		if errors.Is(err, ErrUndefined) {
			return Keys{}, errors.New("the instance has no role: attach one with the policy in " + m.Page)
		}
		if err != nil {
			return Keys{}, err
		}
		path, what = m.Roles+strings.Fields(role)[0], "keys"
	}
	text, err := m.Read(ctx, path)
	if err != nil {
		return Keys{}, err
	}
	k, until, ok := decodeKeys(text)
	if !ok {
		return Keys{}, fmt.Errorf("%w: the metadata service of %s has sent no %s", cloud.ErrUnavailable, m.Cloud, what)
	}
	m.keys = k
	m.until = until.Add(-reserve)
	return k, nil
}

// Renew makes the next call of Keys ask the service again.
func (m *Metadata) Renew() { m.keys = Keys{} }

// decodeKeys decodes the keys of a role and the time when they end, by the field names of Alibaba Cloud,
// EC2 and Tencent Cloud, and a token of Google Cloud.
func decodeKeys(text string) (Keys, time.Time, bool) {
	var answer struct {
		ID         string `json:"AccessKeyId"`
		Secret     string `json:"AccessKeySecret"`
		Access     string `json:"SecretAccessKey"`
		Security   string `json:"SecurityToken"`
		TmpID      string `json:"TmpSecretId"`
		TmpSecret  string `json:"TmpSecretKey"`
		Token      string
		Expiration string
		Bearer     string `json:"access_token"`
		Seconds    int    `json:"expires_in"`
	}
	if json.Unmarshal([]byte(text), &answer) != nil {
		return Keys{}, time.Time{}, false
	}

	k := Keys{cmp.Or(answer.ID, answer.TmpID), cmp.Or(answer.Secret, answer.Access, answer.TmpSecret), cmp.Or(answer.Security, answer.Token, answer.Bearer)}
	until, err := time.Parse(time.RFC3339, answer.Expiration)
	if err != nil { // keys without a time end at once, so they are used once
		until = time.Now().Add(time.Duration(answer.Seconds) * time.Second)
	}
	return k, until, k.ID != "" && k.Secret != "" || answer.Bearer != ""
}
