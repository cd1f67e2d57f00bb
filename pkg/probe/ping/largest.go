// SPDX-License-Identifier: Apache-2.0

package ping

// Largest returns the size in bytes of the largest packet that passes, by binary search. passes is a size
// that is known to pass, and tooBig a size that is known not to pass. If first lies between them, Largest
// tries it before all others, because most paths carry a common size. try reports whether a packet of a size
// passes. If it returns false for more, the search ends with the largest size that has passed so far.
func Largest(passes, tooBig, first int, try func(size int) (ok, more bool)) int {
	for size := first; tooBig-passes > 1; {
		if size <= passes || size >= tooBig { // also after each try
			size = (passes + tooBig) / 2
		}
		ok, more := try(size)
		if ok {
			passes = size
		} else {
			tooBig = size
		}
		if !more {
			break
		}
	}
	return passes
}
