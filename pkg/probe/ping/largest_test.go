// SPDX-License-Identifier: Apache-2.0

package ping

import "testing"

func TestLargest(t *testing.T) {
	for _, tc := range []struct{ passes, tooBig, first, carries, want, tries int }{
		{84, 1450, 576, 1250, 1250, 12},
		{84, 1450, 576, 84, 84, 12},
		{84, 1450, 576, 1449, 1449, 12},
		{84, 1450, 1280, 1280, 1280, 12},
		{84, 1450, 84, 1250, 1250, 12},
		{84, 1450, 1450, 1250, 1250, 12},
		{1280, 1281, 1280, 1280, 1280, 0}, // nothing to try
		{1251, 1450, 576, 1300, 1300, 9},  // first lies outside
		{68, 9000, 9500, 1500, 1500, 14},
	} {
		tries := 0
		got := Largest(tc.passes, tc.tooBig, tc.first, func(size int) (bool, bool) {
			tries++
			if size <= tc.passes || size >= tc.tooBig {
				t.Errorf("%+v: tries %d, whose result is known", tc, size)
			}
			return size <= tc.carries, true
		})
		if got != tc.want || tries > tc.tries {
			t.Errorf("%+v: %d after %d tries", tc, got, tries)
		}
	}
	n := 0
	if got := Largest(84, 1450, 576, func(int) (bool, bool) { n++; return n == 1, n < 2 }); got != 576 || n != 2 {
		t.Errorf("a search that ends after the second try: %d after %d tries, want 576", got, n)
	}
}
