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

// errInterrupted makes the exit code 2, because a command that ends early does not know whether something is broken.
var errInterrupted = errors.New("interrupted")

// told returns the error in the words of flannelctl.
func told(err error) error {
	if errors.Is(err, context.Canceled) {
		return errInterrupted
	}
	return err
}

// exitCode returns 2 if the command could not ask flanneld or send from a pod, was interrupted, or has wrong arguments,
// and otherwise 1.
func exitCode(err error) int {
	if errors.Is(err, errInterrupted) || errors.As(err, &unknownError{}) || errors.As(err, &usageError{}) || errors.As(err, &silentError{}) || errors.Is(err, errCannotAsk) {
		return 2
	}
	return 1
}
