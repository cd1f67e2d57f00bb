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

	"github.com/flanneld/flanneld/pkg/base/statefile"
)

// bootIDFile contains a value that is new after each boot (random(4)). By that value, load
// finds out whether the commands in the state file ran since the boot.
const bootIDFile = "/proc/sys/kernel/random/boot_id"

// appliedState is the content of the state file: the commands that ran since the boot and
// whose effect still lasts. With it the next process runs only commands whose effect
// differs, and undoes the commands of an earlier configuration. The JSON keys are the file
// format.
type appliedState struct {
	Boot  string `json:"boot"`
	Setup setup  `json:"setup"`
	// Subnets has the added subnets. The key is the subnet of the first address family
	// and not the key of the lease, because commands act on subnets.
	Subnets map[string]entry `json:"subnets"`
}

// setup records what the last start has run: PreStartupCommand and PostStartupCommand. It also
// contains the ShutdownCommand that undoes both.
type setup struct {
	Number int     `json:"number"`         // number of this setup; the hash of each subnet depends on it
	Key    string  `json:"key"`            // hash of PreStartupCommand and the external interface; empty: the next start runs all again
	Output string  `json:"output"`         // of PreStartupCommand
	Post   string  `json:"post,omitempty"` // hash of Number, PostStartupCommand and its input; empty: not run
	Undo   command `json:"undo"`           // ShutdownCommand
	Input  input   `json:"input"`          // for Undo
}

// entry is a subnet whose SubnetAddCommand has run, or may have run.
type entry struct {
	Hash string `json:"hash"` // of the setup, SubnetAddCommand and its input
	// Sure is true once the last job for the subnet has succeeded. Otherwise any part of the
	// effect of its commands may exist.
	Sure  bool    `json:"sure"`
	Undo  command `json:"undo"`  // SubnetRemoveCommand
	Input input   `json:"input"` // for Undo
}

// hash identifies a command with its input, to compare what has run with what is wanted.
func hash(of ...any) string {
	text, _ := json.Marshal(of) // the values are strings and numbers, which always encode
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:12])
}

// stateStore contains the state in memory, and writes it to disk. load must be called before
// the state is used. Methods may be called concurrently.
type stateStore struct {
	dir, name, boot string // directory and name of the file, and the present boot

	mu      sync.Mutex
	now     appliedState
	loaded  bool
	changed bool // the file is out of date
	failing bool // the last write failed
}

func bootID() string {
	text, _ := os.ReadFile(bootIDFile) // without an id, nothing counts as done
	return strings.TrimSpace(string(text))
}

// load reads the state that an earlier process has written since the boot, once and after remove.
func (s *stateStore) load(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.loaded {
		return
	}

	s.loaded = true
	last, err := statefile.Read[appliedState](s.dir, s.name)
	if last.Boot == s.boot && s.boot != "" {
		s.now = last
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "cannot read which commands have run, running them again")
	}

	s.now.Boot = s.boot
	if s.now.Subnets == nil {
		s.now.Subnets = map[string]entry{}
	}
}

// exists reports whether this process has used the state, or any process has written the file.
func (s *stateStore) exists() (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.loaded || s.dir == "" {
		return s.loaded, nil
	}
	last, err := statefile.Read[appliedState](s.dir, s.name)
	return last.Boot != "", err
}

func (s *stateStore) setup() setup {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now.Setup
}

func (s *stateStore) entries() map[string]entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.now.Subnets)
}

func (s *stateStore) change(edit func(now *appliedState)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	edit(&s.now)
	s.changed = true
}

func (s *stateStore) setSetup(next setup) { s.change(func(now *appliedState) { now.Setup = next }) }

// invalidateSetup makes the next start run all commands again. The recorded ShutdownCommand
// stays, because the start must run it first.
func (s *stateStore) invalidateSetup() { s.change(func(now *appliedState) { now.Setup.Key = "" }) }

func (s *stateStore) setEntry(subnet string, e entry) {
	s.change(func(now *appliedState) { now.Subnets[subnet] = e })
}

func (s *stateStore) removeEntry(subnet string) {
	s.change(func(now *appliedState) { delete(now.Subnets, subnet) })
}

// markUndone records that the setup was undone. After that, each added subnet may or may not exist.
func (s *stateStore) markUndone() {
	s.change(func(now *appliedState) {
		now.Setup = setup{Number: now.Setup.Number}
		for subnet, e := range now.Subnets {
			e.Sure = false
			now.Subnets[subnet] = e
		}
	})
}

// flush writes the state to disk if it has changed. After a failure the next call tries again. If it
// is never written, the next process runs the commands a second time.
func (s *stateStore) flush(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.changed {
		return
	}

	err := s.open(func(file *statefile.File[appliedState]) error { return file.Save(s.now) })
	if err != nil && !s.failing {
		klog.FromContext(ctx).Error(err, "cannot record which commands have run, the next start will run them again")
	}
	s.failing = err != nil
	s.changed = err != nil
}

func (s *stateStore) remove() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now = appliedState{Boot: s.boot, Subnets: map[string]entry{}}
	s.changed = false
	err := s.open((*statefile.File[appliedState]).Remove)
	s.loaded = err != nil
	return err
}

func (s *stateStore) open(use func(*statefile.File[appliedState]) error) error {
	file, err := statefile.Open[appliedState](s.dir, s.name)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	return use(file)
}
