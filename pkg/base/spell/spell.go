// SPDX-License-Identifier: Apache-2.0

// Package spell finds the known name that a misspelt one most likely means.
package spell

import "strings"

// Nearest returns the candidate with the smallest distance to word, the first one of
// several, and that distance: the number of letters to insert, remove, replace or swap with
// their neighbour. It returns "" and 0 if there are no candidates. Upper and lower case count
// as equal, and so do dashes and underscores.
func Nearest(word string, candidates []string) (near string, distance int) {
	of := fold(word)
	for i, c := range candidates {
		if d := between(of, fold(c)); i == 0 || d < distance {
			near = c
			distance = d
		}
	}
	return near, distance
}

// Meant returns the nearest candidate if word most likely means it: if there is at most
// one mistake for every three letters of word, or a single mistake in a shorter word, and
// if there are fewer mistakes than letters of the candidate. Otherwise it returns false.
func Meant(word string, candidates []string) (near string, ok bool) {
	near, distance := Nearest(word, candidates)
	if distance > max(1, len(word)/3) || distance >= len(near) {
		return "", false
	}
	return near, true
}

func fold(s string) []rune { return []rune(strings.ReplaceAll(strings.ToLower(s), "_", "-")) }

// between returns the number of letters to insert, remove, replace or swap with their
// neighbour to turn a into b.
func between(a, b []rune) int {
	// Rows of the table of edit distances: before is the row two above row.
	before := make([]int, len(b)+1)
	above := make([]int, len(b)+1)
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
		before = above
		above = row
	}
	return above[len(b)]
}
