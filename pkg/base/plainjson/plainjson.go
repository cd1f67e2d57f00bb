// SPDX-License-Identifier: Apache-2.0

// Package plainjson parses JSON objects in the compact form that programs write: no white
// space, no escapes, ASCII only, no arrays, and as values only strings, whole numbers,
// null and objects. It is several times faster than encoding/json. It refuses any other
// form, and the caller then uses encoding/json. If plainjson accepts an object,
// encoding/json accepts it too and reads the same values.
package plainjson

// maxDepth is the maximum depth of nested objects.
const maxDepth = 4

// Object calls field for each field of the object raw, in order, with the key (without
// quotes) and the value (as written). It returns false if raw is not in compact form or
// if field returns false; field may have been called before that. Both slices point into
// raw.
func Object(raw []byte, field func(key, value []byte) bool) bool {
	n := object(raw, maxDepth, field)
	return n > 0 && n == len(raw)
}

// Text returns the content of a string value that Object passed to field, without its
// quotes. ok is false if value is not a string.
func Text(value []byte) (text []byte, ok bool) {
	if n := quoted(value); n == 0 || n != len(value) {
		return nil, false
	}
	return value[1 : len(value)-1], true
}

// IsNumber reports whether value is a whole number, without a sign, of at most
// nine digits.
func IsNumber(value []byte) bool {
	n := number(value)
	return n > 0 && n == len(value)
}

// object returns the length of the object at the start of b. It returns 0 if b does not
// start with an object in compact form, or if field returns false. Objects may be nested up
// to depth deep, including this one.
func object(b []byte, depth int, field func(key, value []byte) bool) int {
	if depth == 0 || len(b) < 2 || b[0] != '{' {
		return 0
	}
	if b[1] == '}' {
		return 2
	}

	for at := 1; ; at++ {
		k := quoted(b[at:])
		if k == 0 || at+k >= len(b) || b[at+k] != ':' {
			return 0
		}

		key := b[at+1 : at+k-1]
		at += k + 1
		v := value(b[at:], depth)
		if v == 0 || at+v >= len(b) || !field(key, b[at:at+v]) {
			return 0
		}

		at += v
		switch b[at] {
		case '}':
			return at + 1
		case ',':
		default:
			return 0
		}
	}
}

// value, like quoted and number, returns the length of what is at the start of b, or 0 if that is something else.
func value(b []byte, depth int) int {
	if len(b) == 0 {
		return 0
	}

	switch b[0] {
	case '"':
		return quoted(b)
	case '{':
		return object(b, depth-1, func([]byte, []byte) bool { return true })
	case 'n':
		if len(b) >= 4 && string(b[:4]) == "null" {
			return 4
		}
		return 0
	}
	return number(b)
}

func quoted(b []byte) int {
	if len(b) == 0 || b[0] != '"' {
		return 0
	}
	for i, c := range b[1:] {
		switch {
		case c == '"':
			return i + 2
		case c < ' ' || c >= 0x7f || c == '\\':
			return 0
		}
	}
	return 0
}

func number(b []byte) int {
	n := 0
	for n < len(b) && b[n] >= '0' && b[n] <= '9' {
		n++
	}
	if n > 9 || n > 1 && b[0] == '0' {
		return 0
	}
	return n
}
