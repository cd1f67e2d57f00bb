// SPDX-License-Identifier: Apache-2.0

// Flannelctl is the operator's tool for flanneld.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // stop catching signals, so that a second one kills the process
	if err := told(newRoot(thisHost()).ExecuteContext(ctx)); err != nil {
		fmt.Fprintln(os.Stderr, "flannelctl:", err)
		os.Exit(exitCode(err))
	}
}

// openError makes the exit code 2: the command does not know whether something is broken. It has wrong arguments, was
// interrupted, could not ask flanneld or send from a pod, no host has answered, no network of several was chosen, or only
// root may know.
type openError struct{ error }

// Unwrap returns the cause.
func (e openError) Unwrap() error { return e.error }

// told returns the error in the words of flannelctl.
func told(err error) error {
	if errors.Is(err, context.Canceled) {
		return openError{errors.New("interrupted")}
	}
	return err
}

// exitCode returns the exit code of a command that has failed.
func exitCode(err error) int {
	if _, open := errors.AsType[openError](err); open {
		return 2
	}
	return 1
}
