// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// calls is how many messages etcd has received, by method.
type calls map[string]float64

// requests returns etcd's own count of client messages: one for each call, and one for
// each watch on a stream.
func (b *bed) requests(ctx context.Context) (calls, error) {
	host := b.lab.Host(2)
	transport := &http.Transport{DialContext: host.Dial, DisableKeepAlives: true}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, host.EtcdEndpoint()+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	resp, err := (&http.Client{Transport: transport, Timeout: 10 * time.Second}).Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask etcd for its metrics: %w", err)
	}
	defer resp.Body.Close()
	counts := calls{}
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		labels, ok := strings.CutPrefix(lines.Text(), "grpc_server_msg_received_total{")
		if !ok {
			continue
		}
		labels, value, _ := strings.Cut(labels, "} ")
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return nil, fmt.Errorf("read etcd's metrics: %w", err)
		}
		for label := range strings.SplitSeq(labels, ",") {
			if method, ok := strings.CutPrefix(label, "grpc_method="); ok {
				counts[strings.Trim(method, `"`)] += n
			}
		}
	}
	if len(counts) == 0 {
		return nil, fmt.Errorf("etcd's metrics do not count calls")
	}
	return counts, nil
}

// since returns the difference between c and before.
func (c calls) since(before calls) calls {
	added := calls{}
	for method, n := range c {
		if n -= before[method]; n > 0 {
			added[method] = n
		}
	}
	return added
}

func (c calls) total() (sum float64) {
	for _, n := range c {
		sum += n
	}
	return sum
}
