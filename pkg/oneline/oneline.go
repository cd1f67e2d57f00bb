// Package oneline joins errors such that the log keeps to one line for each event.
package oneline

import "strings"

// joined reads like its parts, one after the other.
type joined struct{ parts []error }

// Join returns an error that wraps those of errs that are not nil, as
// errors.Join does, but with "; " between their texts in place of line breaks.
// It returns nil if all are, and the error itself if it is the only one.
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

// Unwrap is for errors.Is and errors.As.
func (j *joined) Unwrap() []error { return j.parts }
