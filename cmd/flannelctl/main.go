// SPDX-License-Identifier: Apache-2.0

// Flannelctl is the operator's tool for flanneld.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // stop catching signals, so that a second one kills the process
	if err := execute(ctx, newRoot(thisHost()), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "flannelctl:", err)
		os.Exit(exitCode(err))
	}
}

// execute runs a command, and returns its error in the words of flannelctl. A script must not take output that could not
// be written for a report without problems.
func execute(ctx context.Context, root *cobra.Command, stdout io.Writer) error {
	out := &outlet{Writer: stdout}
	root.SetOut(out)
	err := root.ExecuteContext(ctx)
	switch {
	case errors.Is(err, context.Canceled):
		return openError{errors.New("interrupted")}
	case out.failed != nil && (err == nil || errors.Is(err, out.failed)):
		return openError{fmt.Errorf("write the output: %w", out.failed)}
	}
	return err
}

// outlet remembers the first error of a Writer.
type outlet struct {
	io.Writer
	failed error
}

// Write implements io.Writer.
func (o *outlet) Write(p []byte) (n int, err error) {
	n, err = o.Writer.Write(p)
	o.failed = cmp.Or(o.failed, err)
	return n, err
}

// openError makes the exit code 2: the command does not know whether something is broken. It has wrong arguments, was
// interrupted, could not ask flanneld, send from a pod or print its result, no host has answered, no network of several
// was chosen, or only root may know.
type openError struct{ error }

// Unwrap returns the cause.
func (e openError) Unwrap() error { return e.error }

// exitCode returns the exit code of a command that has failed.
func exitCode(err error) int {
	if _, open := errors.AsType[openError](err); open {
		return 2
	}
	return 1
}
