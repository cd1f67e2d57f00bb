// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/test/lab"
)

// tracing is the folder in which the guest of test/vm has the trace of the packets that its kernel drops.
// Outside the guest there is no such trace.
const tracing = "/sys/kernel/tracing"

// droppedBetween returns a text about the packets that the kernel dropped between two times, for the message
// of a test that has lost packets. Outside the guest of test/vm the text is empty.
func droppedBetween(from, to time.Time) string {
	if !emulated() {
		return ""
	}
	drops, err := kernelDrops(from, to)
	if err != nil {
		return fmt.Sprintf("; the drops of the kernel are not known: %v", err)
	}
	return fmt.Sprintf("; the kernel dropped in these %v: %q", to.Sub(from).Round(time.Millisecond), drops)
}

// sessions returns a text about the WireGuard sessions in the kernels of all hosts: the times of the last
// handshakes, and the bytes received and sent. It is empty if no host has a WireGuard device.
func sessions(t *testing.T, l *lab.Lab) (text string) {
	t.Helper()
	for _, h := range l.Hosts() {
		for _, what := range []string{"latest-handshakes", "transfer"} {
			if out, err := h.Exec(testContext(t), "wg", "show", "all", what); err == nil && len(out) > 0 {
				text += fmt.Sprintf("; at %d %s of %s: %q", time.Now().Unix(), what, h.Name(), strings.Fields(string(out)))
			}
		}
	}
	return text
}

// kernelDrops returns which functions of the kernel dropped packets between two times, in all network
// namespaces of the guest. Each text consists of the number of packets, the function and the EtherType.
// EtherType 0 means a netlink message that the kernel has freed. The texts do not contain the reason for a
// drop, because the kernel does not print it in a trace that shows the addresses of functions.
func kernelDrops(from, to time.Time) ([]string, error) {
	trace, err := os.ReadFile(tracing + "/trace")
	if err != nil {
		return nil, err
	}
	functions, err := kernelSymbols()
	if err != nil {
		return nil, err
	}
	counts := map[string]int{}
	for line := range strings.Lines(string(trace)) {
		head, event, ok := strings.Cut(line, ": kfree_skb: ")
		if !ok {
			continue
		}
		fields := strings.Fields(head)
		at, err := strconv.ParseFloat(fields[len(fields)-1], 64)
		if err != nil {
			return nil, fmt.Errorf("time in %q: %w", line, err)
		}
		if when := time.UnixMicro(int64(at * 1e6)); when.Before(from) || when.After(to) {
			continue
		}
		drop := map[string]string{}
		for f := range strings.FieldsSeq(event) {
			key, value, _ := strings.Cut(f, "=")
			drop[key] = value
		}
		protocol, err := strconv.Atoi(drop["protocol"])
		if err != nil {
			return nil, fmt.Errorf("protocol in %q: %w", line, err)
		}
		counts[fmt.Sprintf("%s %#04x", functions.of(drop["location"]), protocol)]++
	}
	var drops []string
	for _, what := range slices.Sorted(maps.Keys(counts)) {
		drops = append(drops, fmt.Sprintf("%d %s", counts[what], what))
	}
	return drops, nil
}

// symbols are the functions of the kernel in the order of their addresses.
type symbols []symbol

type symbol struct {
	address uint64
	name    string
}

func kernelSymbols() (symbols, error) {
	file, err := os.Open("/proc/kallsyms")
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var all symbols
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		f := strings.Fields(lines.Text()) // address, kind, name, and perhaps the module
		address, err := strconv.ParseUint(f[0], 16, 64)
		if err != nil || len(f) < 3 {
			return nil, fmt.Errorf("line %q of /proc/kallsyms", lines.Text())
		}
		if strings.EqualFold(f[1], "t") {
			all = append(all, symbol{address, f[2]})
		}
	}
	slices.SortFunc(all, func(a, b symbol) int { return cmp.Compare(a.address, b.address) })
	return all, lines.Err()
}

// of returns the name of the function that contains location, a hexadecimal address. It returns location
// itself if that is not a hexadecimal address, or if no function begins before this address.
func (s symbols) of(location string) string {
	address, err := strconv.ParseUint(strings.TrimPrefix(location, "0x"), 16, 64)
	i, _ := slices.BinarySearchFunc(s, address, func(one symbol, address uint64) int { return cmp.Compare(one.address, address) })
	if err != nil || i == 0 {
		return location
	}
	return s[i-1].name // location is a return address, so it is greater than the address of its function
}
