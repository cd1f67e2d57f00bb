// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/json"
	"fmt"
	"net/url"
	"os"

	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/storage/wal"
)

// etcdChild is the value of os.Args[0] that makes a binary with this package run the
// store.
const etcdChild = "flannel-lab-etcd"

// etcdConfig is the configuration that the store's process gets as its first argument.
type etcdConfig struct {
	Dir                             string
	URLs                            []string
	CertFile, KeyFile, ClientCAFile string `json:",omitempty"`
}

// RunChild must be the first call in main, or in TestMain, of every binary that builds
// labs. The lab starts the same binary, or EtcdOptions.Program, a second time under another
// name to run the store. In that process RunChild runs the store and does not return.
func RunChild() {
	if os.Args[0] != etcdChild {
		return
	}
	if err := serveEtcd(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func serveEtcd(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("%s: want one argument, got %d", etcdChild, len(args))
	}
	var c etcdConfig
	if err := json.Unmarshal([]byte(args[0]), &c); err != nil {
		return fmt.Errorf("parse %s: %w", args[0], err)
	}
	cfg := embed.NewConfig()
	cfg.Dir = c.Dir
	cfg.LogLevel, cfg.LogOutputs = "error", []string{"stderr"}
	cfg.UnsafeNoFsync = true
	wal.SegmentSizeBytes = 4 << 20 // small, because a segment is preallocated, and takes memory on tmpfs
	// A single member waits for no other member, so a short election timeout makes it start
	// quickly. It also allows leases with a short TTL: etcd derives the minimum from it. A
	// shorter tick would take more CPU time at rest, for as long as the lab exists.
	cfg.TickMs, cfg.ElectionMs = 100, 500
	cfg.BcryptCost = 4 // the minimum, so that a login takes less than a second even with the race detector

	cfg.ListenClientUrls = nil
	for _, text := range c.URLs {
		u, err := url.Parse(text)
		if err != nil {
			return err
		}
		cfg.ListenClientUrls = append(cfg.ListenClientUrls, *u)
	}
	cfg.AdvertiseClientUrls = cfg.ListenClientUrls
	cfg.ClientTLSInfo.CertFile, cfg.ClientTLSInfo.KeyFile = c.CertFile, c.KeyFile
	cfg.ClientTLSInfo.TrustedCAFile = c.ClientCAFile
	cfg.ClientTLSInfo.ClientCertAuth = c.ClientCAFile != ""

	if c.CertFile != "" { // etcd reports bad files only after it has reported that it is ready
		if _, err := cfg.ClientTLSInfo.ServerConfig(); err != nil {
			return fmt.Errorf("load TLS files: %w", err)
		}
	}
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return fmt.Errorf("start etcd: %w", err)
	}
	defer e.Close()
	select {
	case <-e.Server.ReadyNotify():
		if _, err := fmt.Fprintln(os.Stdout, "serving"); err != nil {
			return err
		}
	case err := <-e.Err():
		return err
	}
	return <-e.Err()
}
