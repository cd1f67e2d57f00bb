// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net/http"
	"time"

	"github.com/flanneld/flanneld/test/figures"
	"github.com/flanneld/flanneld/test/lab"
)

// requests returns how many messages of all clients etcd has received so far, by method, as etcd
// counts them. It asks etcd from inside host.
func requests(ctx context.Context, host *lab.Host) (figures.Counts, error) {
	transport := &http.Transport{DialContext: host.Dial, DisableKeepAlives: true}
	return figures.EtcdMessages(ctx, &http.Client{Transport: transport, Timeout: 10 * time.Second}, host.EtcdEndpoint())
}
