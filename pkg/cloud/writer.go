// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"fmt"

	"github.com/flanneld/flanneld/pkg/oneline"
)

// Values of Backend.Writer in the configuration. They choose the hosts that write routes.
const (
	WriterHost   = "host"   // each host writes the routes to its own subnets
	WriterLeader = "leader" // one elected host writes the routes to all hosts
)

// CheckWriter returns an error if w is not a value of Backend.Writer. An empty w is valid, and means WriterHost.
func CheckWriter(w string) error {
	switch w {
	case "", WriterHost, WriterLeader:
		return nil
	}
	return fmt.Errorf("Backend.Writer is %q: want %s or %s", oneline.Cut(w), WriterHost, WriterLeader)
}
