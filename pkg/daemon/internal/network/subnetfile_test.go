// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestFilesAreCheckedTogether starts file keepers at different times. They must check their files at
// the same moments, at least once in fileCheck, and write a file again that was lost.
func TestFilesAreCheckedTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 10
		var mu sync.Mutex
		checks := map[time.Time][]int{}
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		dir := t.TempDir()
		for i := range n {
			k := &fileKeeper{path: filepath.Join(dir, "subnet.env"), report: func(error) {
				mu.Lock()
				defer mu.Unlock()
				checks[time.Now()] = append(checks[time.Now()], i)
			}}
			running.Go(func() { k.run(ctx) })
			time.Sleep(700 * time.Millisecond)
		}
		time.Sleep(fileCheck)
		mu.Lock()
		clear(checks)
		mu.Unlock()
		if err := os.Remove(filepath.Join(dir, "subnet.env")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * fileCheck)
		cancel()
		running.Wait()
		if len(checks) != 10 {
			t.Errorf("checks at %d moments in ten periods, want ten", len(checks))
		}
		for at, who := range checks {
			if slices.Sort(who); len(slices.Compact(who)) != n {
				t.Errorf("at %s the files of %v were checked, want all %d", at, who, n)
			}
		}
		if _, err := os.Stat(filepath.Join(dir, "subnet.env")); err != nil {
			t.Errorf("the lost file: %v", err)
		}
	})
}
