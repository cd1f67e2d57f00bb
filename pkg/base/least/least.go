// SPDX-License-Identifier: Apache-2.0

// Package least compares values of which zero means that there is none.
package least

import "cmp"

// Of returns the least of the values that are not zero, or zero if there are none.
func Of[T cmp.Ordered](values ...T) (least T) {
	var none T
	for _, v := range values {
		if v != none && (least == none || v < least) {
			least = v
		}
	}
	return least
}
