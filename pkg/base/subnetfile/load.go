// SPDX-License-Identifier: Apache-2.0

package subnetfile

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

const maxMTU = 1<<16 - 1 // bytes

// Load returns the content of the file at path for a consumer that needs all of it: a
// missing or damaged value is an error. The error wraps fs.ErrNotExist if the file does
// not exist. Prefixes are masked.
func Load(path string) (File, error) {
	data, err := readBounded(path)
	if err != nil {
		return File{}, fmt.Errorf("read subnet file %s: %w", path, err)
	}
	f, err := load(data)
	if err != nil {
		return File{}, fmt.Errorf("subnet file %s: %w", path, err)
	}
	return f, nil
}

func load(data []byte) (f File, err error) {
	var p Previous
	vars := p.variables(data)
	for _, family := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		k := keysOf[family]
		if vars[k.network] == "" && vars[k.subnet] == "" {
			continue
		}
		e := Entry{Network: p.prefix(vars, k.network, family), Subnet: p.prefix(vars, k.subnet, family)}
		if !e.Network.IsValid() || !e.Subnet.IsValid() {
			return File{}, fmt.Errorf("want one %s prefix each in %s and %s, have %s and %s",
				family, k.network, k.subnet, quote(vars[k.network]), quote(vars[k.subnet]))
		}
		f.Entries = append(f.Entries, e)
	}
	if len(f.Entries) == 0 {
		return File{}, errors.New("no subnet in it")
	}
	if f.MTU, err = strconv.Atoi(vars[keyMTU]); err != nil || f.MTU < 1 || f.MTU > maxMTU {
		return File{}, fmt.Errorf("%s is %s: want 1 to %d bytes", keyMTU, quote(vars[keyMTU]), maxMTU)
	}
	if f.IPMasq, err = strconv.ParseBool(vars[keyIPMasq]); err != nil {
		return File{}, fmt.Errorf("%s is %s: want true or false", keyIPMasq, quote(vars[keyIPMasq]))
	}
	return f, nil
}
