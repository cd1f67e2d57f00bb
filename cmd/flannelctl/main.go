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
	if err := newRoot(thisHost()).ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "flannelctl:", err)
		os.Exit(exitCode(err))
	}
}

// exitCode returns 2 if the command could not ask flanneld or send from a pod, or has wrong arguments, and otherwise 1.
func exitCode(err error) int {
	if errors.As(err, &unknownError{}) || errors.As(err, &usageError{}) || errors.As(err, &choiceError{}) || errors.Is(err, errCannotAsk) {
		return 2
	}
	return 1
}
