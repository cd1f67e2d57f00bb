// SPDX-License-Identifier: Apache-2.0

package options

import "strings"

// nearest returns the candidate that name most likely means. ok is false if no candidate
// is near, which means about one mistake in three letters. Dashes and underscores count
// as equal.
func nearest(name string, candidates []string) (near string, ok bool) {
	best := max(1, len(name)/3) + 1
	for _, c := range candidates {
		if d := distance(fold(name), fold(c)); d < best && d < len(c) {
			best, near = d, c
		}
	}
	return near, near != ""
}

func fold(s string) string { return strings.ReplaceAll(strings.ToLower(s), "_", "-") }

// distance returns the number of letters to insert, remove, replace or swap with their
// neighbour to turn a into b.
func distance(a, b string) int {
	// Rows of the table of edit distances: before is the row two above row.
	before, above := make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range above {
		above[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row := make([]int, len(b)+1)
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(above[j]+1, row[j-1]+1, above[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, above = above, row
	}
	return above[len(b)]
}
