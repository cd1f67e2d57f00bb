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

	"flanneld/pkg/state"
)

// bootIDFile changes with every boot, and so tells what was run before.
const bootIDFile = "/proc/sys/kernel/random/boot_id"

// record is what was run since the boot and is still in force.
type record struct {
	Boot  string `json:"boot"`
	Setup setup  `json:"setup"`
	// Subnets has what was added, by the subnet of its first address family:
	// that, and not the lease, is what commands work on.
	Subnets map[string]entry `json:"subnets"`
}

// setup is what the commands at the start have done.
type setup struct {
	Number int     `json:"number"`         // of this setup: subnets are added to one
	Key    string  `json:"key"`            // what it was made for; empty: there is none
	Output string  `json:"output"`         // of PreStartupCommand
	Post   string  `json:"post,omitempty"` // what PostStartupCommand was run for; empty: it was not
	Undo   command `json:"undo"`
	Input  input   `json:"input"` // for Undo
}

// entry is one subnet that was added.
type entry struct {
	Hash string `json:"hash"` // of what it was added by
	// Sure is false from before the first command until the last one has
	// succeeded: any part may be there or not.
	Sure  bool    `json:"sure"`
	Undo  command `json:"undo"`
	Input input   `json:"input"` // for Undo
}

// hash tells what was run from what should be.
func hash(of ...any) string {
	text, _ := json.Marshal(of) // strings and numbers
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:12])
}

// book keeps the record, in memory and on disk.
type book struct {
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
		return "" // nothing is taken for granted then
	}
	return strings.TrimSpace(string(text))
}

// load reads what an earlier process has run since the boot, the first time.
func (b *book) load(ctx context.Context) {
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
		klog.FromContext(ctx).Error(err, "it is not known what earlier commands have done")
	}
	b.now.Boot = b.boot
	if b.now.Subnets == nil {
		b.now.Subnets = map[string]entry{}
	}
}

func (b *book) setup() setup {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.now.Setup
}

func (b *book) setSetup(s setup) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now.Setup, b.changed = s, true
}

// entries returns a copy of what was added.
func (b *book) entries() map[string]entry {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.now.Subnets)
}

func (b *book) setEntry(subnet string, e entry) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now.Subnets[subnet], b.changed = e, true
}

func (b *book) removeEntry(subnet string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.now.Subnets, subnet)
	b.changed = true
}

// closeDown notes that the setup has been undone.
func (b *book) closeDown() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now.Setup, b.changed = setup{Number: b.now.Setup.Number}, true
	for subnet, e := range b.now.Subnets {
		e.Sure = false
		b.now.Subnets[subnet] = e
	}
}

// distrust has the next start begin from the beginning: ShutdownCommand is still
// to be run.
func (b *book) distrust() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now.Setup.Key, b.changed = "", true
}

// flush writes what has changed. A disk that does not work costs the next
// start a second run of the commands, and is logged once.
func (b *book) flush(ctx context.Context) {
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
		klog.FromContext(ctx).Error(err, "what has been run is not remembered: the next start will run it again")
	}
	b.failing, b.changed = err != nil, err != nil
}
