// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/test/lab"
)

func TestKernelTwoLabs(t *testing.T) {
	a, b := newLab(t, lab.Config{Hosts: 1, Network: []byte(`{"lab":"a"}`)}), newLab(t, lab.Config{Hosts: 1, Network: []byte(`{"lab":"b"}`)})
	for l, want := range map[*lab.Lab]string{a: `{"lab":"a"}`, b: `{"lab":"b"}`} {
		if got := get(t, client(t, l), lab.Prefix+"/config"); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func client(t *testing.T, l *lab.Lab) *clientv3.Client {
	t.Helper()
	c, err := l.Etcd().Client(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func get(t *testing.T, c *clientv3.Client, key string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	resp, err := c.Get(ctx, key)
	if err != nil {
		t.Fatal(err)
	}
	if len(resp.Kvs) == 0 {
		return ""
	}
	return string(resp.Kvs[0].Value)
}

func TestKernelEtcdSurvives(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 1, Families: dual, Network: []byte("{}")})
	c := client(t, l)
	if _, err := c.Put(t.Context(), "key", "value"); err != nil {
		t.Fatal(err)
	}
	e := l.Etcd()

	if err := e.Stop(); err != nil {
		t.Fatal(err)
	}
	frozen, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := c.Get(frozen, "key"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a frozen store answers: %v", err)
	}
	if err := e.Cont(); err != nil {
		t.Fatal(err)
	}
	if got := get(t, c, "key"); got != "value" {
		t.Errorf("after SIGCONT: %q", got)
	}

	e.Kill()
	if _, err := l.Host(1).Dial(t.Context(), "tcp", strings.TrimPrefix(l.Host(1).EtcdEndpoint(), "http://")); err == nil {
		t.Error("a killed store accepts connections")
	}
	if err := e.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := get(t, c, "key"); got != "value" {
		t.Errorf("after restart: %q", got)
	}
	if err := e.Wipe(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := get(t, c, "key"); got != "" {
		t.Errorf("after wiping: %q", got)
	}
}

func TestKernelEtcdTLS(t *testing.T) {
	for name, opt := range map[string]lab.EtcdOptions{
		"CA alone":     {TLS: true},
		"client certs": {TLS: true, ClientCerts: true},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t, lab.Config{Hosts: 2, Segments: 2, Families: dual, Etcd: opt, Network: []byte("{}")})
			if got := get(t, client(t, l), lab.Prefix+"/config"); got != "{}" {
				t.Errorf("got %q", got)
			}
			for what, change := range map[string]func(*clientv3.Config){
				"authority":          func(c *clientv3.Config) { c.TLS.RootCAs = nil },
				"client certificate": func(c *clientv3.Config) { c.TLS.Certificates = nil },
			} {
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
				defer cancel()
				c, err := l.Etcd().Client(ctx, change)
				if err != nil {
					t.Fatal(err)
				}
				_, err = c.Get(ctx, "key")
				if wantErr := what == "authority" || opt.ClientCerts; (err != nil) != wantErr {
					t.Errorf("without %s: %v", what, err)
				}
				c.Close()
			}
			d, err := l.Host(2).StartFlanneld(t.Context(), lab.FlanneldOptions{Path: "/bin/echo"})
			if err != nil {
				t.Fatal(err)
			}
			for _, want := range []string{"https://192.168.78.254:2379", "--etcd-cafile=/proc/"} {
				if err := d.WaitLog(t.Context(), want); err != nil {
					t.Error(err)
				}
			}
			if got := strings.Contains(d.Log(), "--etcd-keyfile=/proc/"); got != opt.ClientCerts {
				t.Errorf("client key given: %v in %s", got, d.Log())
			}
			file := l.Etcd().TLSFiles().CA
			if _, err := l.Host(1).Exec(t.Context(), "cat", file); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestKernelEtcdFailsToStart(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 1})
	l.Etcd().Kill()
	if err := os.RemoveAll(l.Etcd().Dir()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(l.Etcd().Dir(), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := l.Etcd().Start(t.Context()); err == nil || !strings.Contains(err.Error(), "/var/lib/etcd") {
		t.Errorf("got %v, want the directory named", err)
	}
}

func TestKernelLeases(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 1})
	c := client(t, l)
	lease, err := c.Grant(t.Context(), 3600)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Put(t.Context(), lab.Prefix+"/subnets/10.5.1.0-24", "{}", clientv3.WithLease(lease.ID)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Put(t.Context(), lab.Prefix+"/subnets/10.5.2.0-24", "{}"); err != nil {
		t.Fatal(err)
	}
	got, err := l.Leases(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].Key != "10.5.1.0-24" || got[0].TTL < time.Minute || got[1].TTL != 0 {
		t.Errorf("got %+v", got)
	}
}
