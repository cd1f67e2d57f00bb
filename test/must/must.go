// SPDX-License-Identifier: Apache-2.0

// Package must ends a task at its first error, as testing.T does with a test. Programs for tests
// consist of hundreds of steps that can fail, and do not go on after a failure.
package must

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
)

// Main runs a program as a task, and ends the process if the task fails. ctx ends at SIGINT and SIGTERM.
func Main(name string, run func(ctx context.Context)) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := Catch(func() { run(ctx) })
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, name+":", err)
		os.Exit(1)
	}
}

// failure carries an error from Do, Get or Fail to Catch. Like the panics of encoding/json and
// text/template, it does not leave the program: main calls everything within Catch.
type failure struct{ err error }

// Do ends the task unless err is nil. The error of Catch then begins with the caller's line.
func Do(err error) { check(err) }

// Get returns v. It ends the task like Do unless err is nil.
func Get[T any](v T, err error) T {
	check(err)
	return v
}

// Fail ends the task with an error that needs no line.
func Fail(format string, args ...any) { panic(failure{fmt.Errorf(format, args...)}) }

// check is called by functions that a task calls.
func check(err error) {
	if err == nil {
		return
	}
	if _, file, line, ok := runtime.Caller(2); ok {
		err = fmt.Errorf("%s:%d: %w", filepath.Base(file), line, err)
	}
	panic(failure{err})
}

// Catch runs f, and returns the error with which Do, Get or Fail has ended it. A goroutine that f starts
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
