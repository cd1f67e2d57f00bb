// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"hash/fnv"
	"os/exec"
	"testing"
)

// Seed returns the seed of a random test of a program: each version of the program gets another one, but one version
// always gets the same, so that a failure comes back until its cause is mended.
func Seed(t testing.TB, program string) uint64 {
	t.Helper()
	version, err := exec.CommandContext(t.Context(), program, "--version").Output()
	if err != nil {
		t.Fatalf("ask %s for its version: %v", program, err)
	}

	h := fnv.New64a()
	h.Write(version)
	h.Write([]byte(t.Name()))
	return h.Sum64()
}
