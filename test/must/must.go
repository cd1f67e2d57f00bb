// SPDX-License-Identifier: Apache-2.0

// Package must ends a measurement at its first error, as testing.T does with a test. A measurement
// has hundreds of steps that can fail, and none of them goes on after a failure.
package must

import "fmt"

// failure carries an error from Do or Get to Catch. Like the panics of encoding/json and text/template,
// it does not leave the program: main calls everything within Catch.
type failure struct{ err error }

// Do ends the measurement unless err is nil.
func Do(err error) {
	if err != nil {
		panic(failure{err})
	}
}

// Get returns v. It ends the measurement unless err is nil.
func Get[T any](v T, err error) T {
	Do(err)
	return v
}

// Catch runs f, and returns the error with which Do or Get has ended it. A goroutine that f starts
// needs a Catch of its own.
func Catch(f func()) (err error) {
	defer func() {
		if r := recover(); r != nil {
			failed, ok := r.(failure)
			if !ok {
				panic(r)
			}
			err = failed.err
		}
	}()
	f()
	return nil
}

// Fail ends the measurement with a message.
func Fail(format string, args ...any) { Do(fmt.Errorf(format, args...)) }
