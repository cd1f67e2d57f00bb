// SPDX-License-Identifier: Apache-2.0

// Command flanneld gives this host a subnet of a flat network and keeps the
// kernel's routes to the subnets of all other hosts.
package main

import (
	"os"

	"github.com/flanneld/flanneld/cmd/flanneld/app"
)

func main() {
	os.Exit(app.Main(os.Args[1:], os.Environ(), os.Stderr))
}
