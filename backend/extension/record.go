// SPDX-License-Identifier: Apache-2.0

package extension

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"os"
	"strings"
	"sync"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/state"
)

// bootIDFile changes with every boot. It tells whether recorded commands ran since the
// boot.
const bootIDFile = "/proc/sys/kernel/random/boot_id"

// record describes the commands that ran since the boot and whose effect still lasts.
type record struct {
	Boot  string `json:"boot"`
	Setup setup  `json:"setup"`
	// Subnets has the added subnets. The key is the subnet of the first address family
	// and not the lease, because commands act on subnets.
	Subnets map[string]entry `json:"subnets"`
}

// setup describes the commands at the start that have run.
type setup struct {
	Number int     `json:"number"`         // counts the setups; a subnet belongs to one of them
	Key    string  `json:"key"`            // hash of the command and interface that it was made for; empty: not done
	Output string  `json:"output"`         // of PreStartupCommand
	Post   string  `json:"post,omitempty"` // hash of the input of PostStartupCommand; empty: not run
	Undo   command `json:"undo"`
	Input  input   `json:"input"` // for Undo
}

// entry is a subnet that was added.
type entry struct {
	Hash string `json:"hash"` // of the command and input that added it
	// Sure is true once all commands have succeeded. Otherwise any part of their effect
	// may exist.
	Sure  bool    `json:"sure"`
	Undo  command `json:"undo"`
	Input input   `json:"input"` // for Undo
}

// hash identifies a command with its input, to compare what has run with what is wanted.
func hash(of ...any) string {
	text, _ := json.Marshal(of) // the values are strings and numbers, which always encode
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:12])
}

// recordFile keeps the record in memory and on disk.
type recordFile struct {
	dir, name, boot string

	mu      sync.Mutex
	now     record
	loaded  bool
	changed bool
	failing bool
}

func bootID() string {
	text, err := os.ReadFile(bootIDFile)
	if err != nil {
		return "" // without an id, nothing counts as done
	}
	return strings.TrimSpace(string(text))
}

// load reads, at its first call, the record that an earlier process wrote since the boot.
func (b *recordFile) load(ctx context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.loaded {
		return
	}
	b.loaded = true
	file, err := state.Open[record](b.dir, b.name)
	if err == nil {
		var last record
		last, _, err = file.Load()
		if last.Boot == b.boot && b.boot != "" {
			b.now = last
		}
		_ = file.Close()
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "cannot read which commands have run, running them again")
	}
	b.now.Boot = b.boot
	if b.now.Subnets == nil {
		b.now.Subnets = map[string]entry{}
	}
}

func (b *recordFile) setup() setup {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.now.Setup
}

func (b *recordFile) setSetup(s setup) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now.Setup, b.changed = s, true
}

// entries returns a copy of the added subnets.
func (b *recordFile) entries() map[string]entry {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.now.Subnets)
}

func (b *recordFile) setEntry(subnet string, e entry) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now.Subnets[subnet], b.changed = e, true
}

func (b *recordFile) removeEntry(subnet string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.now.Subnets, subnet)
	b.changed = true
}

// closeDown records that the setup was undone. Subnets that were added may or may not
// exist after that, so they count as unknown.
func (b *recordFile) closeDown() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now.Setup, b.changed = setup{Number: b.now.Setup.Number}, true
	for subnet, e := range b.now.Subnets {
		e.Sure = false
		b.now.Subnets[subnet] = e
	}
}

// distrust makes the next start begin from the beginning. It keeps ShutdownCommand, which
// must still run.
func (b *recordFile) distrust() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now.Setup.Key, b.changed = "", true
}

// flush writes the record if it has changed. If that fails, the next start runs the
// commands a second time; the failure is logged once.
func (b *recordFile) flush(ctx context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.changed {
		return
	}
	file, err := state.Open[record](b.dir, b.name)
	if err == nil {
		err = file.Save(b.now)
		_ = file.Close()
	}
	if err != nil && !b.failing {
		klog.FromContext(ctx).Error(err, "cannot record which commands have run, the next start will run them again")
	}
	b.failing, b.changed = err != nil, err != nil
}
