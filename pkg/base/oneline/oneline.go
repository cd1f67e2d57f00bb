// SPDX-License-Identifier: Apache-2.0

// Package oneline joins several errors or texts into one, and returns texts and the text of errors, without
// line breaks and not too long: each log entry is one line that a person can read.
package oneline

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
)

// joined is an error whose text is the texts of its parts, separated by "; ".
type joined struct{ parts []error }

// Join returns an error that wraps all non-nil errs, like errors.Join, but separates
// their texts with "; " instead of line breaks. It returns nil if all are nil, and the
// error itself if only one is not nil.
func Join(errs ...error) error {
	var some []error
	for _, err := range errs {
		if err != nil {
			some = append(some, err)
		}
	}

	switch len(some) {
	case 0:
		return nil
	case 1:
		return some[0]
	}
	return &joined{some}
}

// Error implements error.
func (j *joined) Error() string {
	texts := make([]string, len(j.parts))
	for i, err := range j.parts {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
}

// Unwrap makes the parts visible to errors.Is and errors.As.
func (j *joined) Unwrap() []error { return j.parts }

// most is the number of texts of a list that List shows.
const most = 8

// List joins the first texts with sep. If there are more, it adds their number.
func List(texts []string, sep string) string {
	if more := len(texts) - most; more > 0 {
		texts = append(slices.Clone(texts[:most]), fmt.Sprintf("and %d more", more))
	}
	return strings.Join(texts, sep)
}

// Strings returns the texts of values.
func Strings[T fmt.Stringer](values []T) []string {
	texts := make([]string, 0, len(values))
	for _, v := range values {
		texts = append(texts, v.String())
	}
	return texts
}

// longest is the number of bytes that Cut leaves of a text.
const longest = 1000

// Cut returns text, but of a text that is too long for a log line only the beginning, with the number of
// bytes that follow.
func Cut(text string) string {
	if more := len(text) - longest; more > 0 {
		return fmt.Sprintf("%s… (%d more bytes)", strings.ToValidUTF8(text[:longest], ""), more)
	}
	return text
}

// Shorten returns the first bytes of text, at most most of them, with "…" in place of the rest. It does not
// remove line breaks.
func Shorten(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}

// Text returns the text of err with "; " in place of line breaks, cut like by Cut, or "" if err is nil.
func Text(err error) string {
	if err == nil {
		return ""
	}
	return Cut(strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' || r == '\r' }), "; "))
}

// Collapse returns text with one space in place of each run of white space and characters that cannot be
// printed, and with none at either end. Other programs and servers send such characters, which
// would change how a terminal shows the log.
func Collapse(text string) string {
	text = strings.ToValidUTF8(text, string(unicode.ReplacementChar)) // a single byte can begin a control sequence, too
	return strings.Join(strings.FieldsFunc(text, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }), " ")
}
