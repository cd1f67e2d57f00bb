// SPDX-License-Identifier: Apache-2.0

package oneline

import (
	"errors"
	"io"
	"io/fs"
	"strings"
	"testing"
)

func TestJoin(t *testing.T) {
	one := errors.New("one")
	if err := Join(nil, nil); err != nil {
		t.Errorf("Join(nil, nil) = %v, want nil", err)
	}
	if err := Join(nil, one, nil); !errors.Is(err, one) || err.Error() != "one" {
		t.Errorf("Join of one error = %v, want that error", err)
	}
	err := Join(one, nil, io.EOF, Join(fs.ErrExist, fs.ErrClosed))
	if got, want := err.Error(), "one; EOF; file already exists; file already closed"; got != want {
		t.Errorf("text %q, want %q", got, want)
	}
	for _, part := range []error{one, io.EOF, fs.ErrExist, fs.ErrClosed} {
		if !errors.Is(err, part) {
			t.Errorf("%v is not found by errors.Is", part)
		}
	}
	if errors.Is(err, fs.ErrInvalid) {
		t.Error("errors.Is finds an error that was not joined")
	}
}

func TestText(t *testing.T) {
	for text, want := range map[string]string{"one": "one", "one\ntwo": "one; two", "\r\none\r\n\r\ntwo\n": "one; two"} {
		if got := Text(errors.New(text)); got != want {
			t.Errorf("text of %q: %q, want %q", text, got, want)
		}
	}
	if got := Text(nil); got != "" {
		t.Errorf("text of no error: %q, want none", got)
	}
}

func TestList(t *testing.T) {
	eight := strings.Split("abcdefgh", "")
	for want, texts := range map[string][]string{"": nil, "a, b, c, d, e, f, g, h": eight, "a, b, c, d, e, f, g, h, and 2 more": append(eight, "i", "j")} {
		if got := List(texts, ", "); got != want {
			t.Errorf("list of %q: %q, want %q", texts, got, want)
		}
	}
}

func TestCut(t *testing.T) {
	if got := Cut(strings.Repeat("a", longest)); len(got) != longest {
		t.Errorf("%d bytes of a text with %d bytes are left", len(got), longest)
	}
	want := strings.Repeat("a", longest-1) + "… (299003 more bytes)"
	if got := Text(errors.New(strings.Repeat("a", longest-1) + "世" + strings.Repeat("a", 299_001))); got != want {
		t.Errorf("text of a long error: %.40q…%q, want %.40q…%q", got, got[max(0, len(got)-40):], want, want[len(want)-40:])
	}
}

func TestCollapse(t *testing.T) {
	for text, want := range map[string]string{
		"":                            "",
		" \n\t\x00":                   "",
		"one":                         "one",
		"\n one\r\n\ttwo  three\n":    "one two three",
		"\x1b[31mred\x1b[0m":          "[31mred [0m",
		"no\u00a0break\u2028line":     "no break line",
		"zero\u200bwidth":             "zero width",
		"für \"alle\" \xff 世界 \ufffd": "für \"alle\" \ufffd 世界 \ufffd",
		"\x9b2Jforged":                "\ufffd2Jforged",
	} {
		if got := Collapse(text); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}
