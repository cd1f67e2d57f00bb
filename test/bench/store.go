// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
)

// requests returns etcd's own count of client messages, by method. The question comes from host.
func requests(ctx context.Context, host *lab.Host) (figures.Counts, error) {
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
	return figures.ReadCounts(resp.Body, figures.EtcdRequests, figures.EtcdMethod)
}
