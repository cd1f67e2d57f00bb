// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
)

// maxNetworkName is less than the 255 bytes of a file name, to leave room for a suffix.
const maxNetworkName = 200 // bytes

// CheckNetworkName returns an error if one of several networks cannot have that name. The name is
// part of the keys in the store, between slashes, and of the names of files.
func CheckNetworkName(name string) error {
	unusable := func(r rune) bool { return r == '/' || r == ',' || unicode.IsSpace(r) || !unicode.IsPrint(r) }
	switch {
	case name == "":
		return errors.New("a network needs a name")
	case name == "config" || name == "subnets":
		return fmt.Errorf("a network cannot have the name %q: expected another one, because a single network has this key in etcd", name)
	case name == "." || name == ".." || len(name) > maxNetworkName || strings.ContainsFunc(name, unusable):
		return fmt.Errorf("a network cannot have the name %q: expected at most %d printable characters without blank, comma or slash", name, maxNetworkName)
	}
	return nil
}
