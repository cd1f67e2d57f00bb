// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"errors"
	"strings"
)

// maxName is the greatest length of the name of a location or a backend type, in bytes.
const maxName = 63

// CheckLocation returns an error if name cannot be the name of a location. A name has the form of a
// label's value in Kubernetes, because it can come from a label of the Node. Unlike that value, it
// must not be empty.
func CheckLocation(name string) error {
	const inside = "-_." // characters that a name neither begins nor ends with
	const others = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	if name == "" || len(name) > maxName || strings.Trim(name, inside) != name || strings.Trim(name, inside+others) != "" {
		return errors.New("expected a name of at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends")
	}
	return nil
}

// CheckType returns an error if name cannot be the backend type of a lease. Other hosts write it, and it
// reaches logs and terminals. It may be empty, as in leases of the backend udp.
func CheckType(name string) error {
	if name == "" {
		return nil
	}
	return CheckLocation(name)
}
