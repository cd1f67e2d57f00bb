package lab

import (
	"encoding/json"
	"fmt"
	"net/url"
	"os"

	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/storage/wal"
)

// etcdChild is what a binary that uses this package is called when it is to be
// the store.
const etcdChild = "flannel-lab-etcd"

// etcdConfig is the store's first argument.
type etcdConfig struct {
	Dir                             string
	URLs                            []string
	CertFile, KeyFile, ClientCAFile string `json:",omitempty"`
}

// RunChild must be the first thing in main, or in TestMain, of every binary
// that builds labs: the store is that binary again, under another name. In it
// RunChild does not return.
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
	wal.SegmentSizeBytes = 4 << 20 // preallocated, and that in memory here
	// A single member that need not wait for others: quick to start, and good
	// for short leases, whose minimum follows from the election timeout.
	cfg.TickMs, cfg.ElectionMs = 20, 200
	cfg.BcryptCost = 4 // the least: a login takes no second, even with the race detector

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

	if c.CertFile != "" { // etcd finds out only after it says that it is ready
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
