// SPDX-License-Identifier: Apache-2.0

// Command release makes those parts of a release that the compiler does not make: the
// archive of the container image, and the signed statement of provenance.
//
//	release image -name NAME:TAG -out ARCHIVE ARCH=FOLDER...
//	release sign -key FILE -out FILE [flags] ARTIFACT...
//	release verify -key FILE STATEMENT
//
// All results depend only on the arguments, the contents of the files, and
// SOURCE_DATE_EPOCH, so that two builds of a commit are equal.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	command := ""
	if len(args) > 0 {
		command, args = args[0], args[1:]
	}
	switch command {
	case "image":
		return writeImage(args)
	case "sign":
		return sign(ctx, args)
	case "verify":
		return verify(ctx, args, out)
	}
	return fmt.Errorf("command is %q: want image, sign or verify", command)
}
