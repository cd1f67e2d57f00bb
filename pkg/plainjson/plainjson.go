// Package plainjson takes JSON objects apart that are as plain as those that
// machines write: no space, no escapes, ASCII only, whole numbers. It is several
// times faster than encoding/json and refuses everything else, which is for
// encoding/json to read then: what both accept means the same to both.
package plainjson

// maxDepth bounds how deep objects are nested.
const maxDepth = 4

// Object calls field for each field of the object raw, in order, with its key
// without quotes and its value as it stands there. It reports false, perhaps
// after some calls, if raw is not plain or field returns false. The slices are
// parts of raw.
func Object(raw []byte, field func(key, value []byte) bool) bool {
	n := object(raw, maxDepth, field)
	return n > 0 && n == len(raw)
}

// Text returns what is between the quotes of a string that Object has passed on.
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

// object returns the length of the object that b begins with; 0 if there is no
// plain one.
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

// value returns the length of the value that b begins with.
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

// quoted returns the length of the string that b begins with, with its quotes.
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

// number returns the length of the number that b begins with.
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
