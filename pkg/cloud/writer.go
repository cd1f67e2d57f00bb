// SPDX-License-Identifier: Apache-2.0

package cloud

import "fmt"

// The hosts that write routes, as Backend.Writer in the configuration.
const (
	WriterHost   = "host"   // each host writes the routes to its own subnets
	WriterLeader = "leader" // one elected host writes the routes to all hosts
)

// CheckWriter returns an error unless w is a writer, or empty, which means WriterHost.
func CheckWriter(w string) error {
	switch w {
	case "", WriterHost, WriterLeader:
		return nil
	}
	return fmt.Errorf("Backend.Writer is %q: want %s or %s", w, WriterHost, WriterLeader)
}
