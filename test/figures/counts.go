// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/flanneld/flanneld/test/must"
)

// Counts contains the number of requests of each kind.
type Counts map[string]float64

// Add adds other to c.
func (c Counts) Add(other Counts) {
	for kind, n := range other {
		c[kind] += n
	}
}

// Since returns by how much each number has grown since the earlier reading in before. It omits
// kinds that have not grown.
func (c Counts) Since(before Counts) Counts {
	added := Counts{}
	for kind, n := range c {
		if n -= before[kind]; n > 0 {
			added[kind] = n
		}
	}
	return added
}

// Total returns the number of all requests.
func (c Counts) Total() (sum float64) {
	for _, n := range c {
		sum += n
	}
	return sum
}

// String returns the numbers by kind, the largest first, such as "Range 3, Put 1". It omits
// kinds without a request.
func (c Counts) String() string {
	kinds := slices.SortedFunc(maps.Keys(c), func(a, b string) int { return cmp.Or(cmp.Compare(c[b], c[a]), cmp.Compare(a, b)) })
	var parts []string
	for _, kind := range kinds {
		if n := c[kind]; n > 0 {
			parts = append(parts, fmt.Sprintf("%s %.0f", kind, n))
		}
	}
	return strings.Join(parts, ", ")
}

// EtcdMessages returns how many messages the etcd at endpoint has received since its start, by
// method. A call without a stream is one message. On a stream, each request is one, such as
// that for a new watch.
func EtcdMessages(ctx context.Context, client *http.Client, endpoint string) Counts {
	req := must.Get(http.NewRequestWithContext(ctx, http.MethodGet, endpoint+"/metrics", http.NoBody))
	resp := must.Get(client.Do(req))
	defer resp.Body.Close()
	return ReadCounts(resp.Body, "grpc_server_msg_received_total", "grpc_method")
}

// ReadCounts reads one counter from a page of Prometheus metrics. The values of the given
// labels, with a space between them, are the kind; time series of the same kind are added up.
// The page must have the counter.
func ReadCounts(page io.Reader, name string, labels ...string) Counts {
	found := Counts{}
	lines := bufio.NewScanner(page)
	lines.Buffer(nil, 1<<20)

	for lines.Scan() {
		rest, ok := strings.CutPrefix(lines.Text(), name+"{")
		if !ok {
			continue
		}

		pairs, value, _ := strings.Cut(rest, "} ")
		kinds := make([]string, len(labels))
		for pair := range strings.SplitSeq(pairs, ",") {
			label, value, _ := strings.Cut(pair, "=")
			if i := slices.Index(labels, label); i >= 0 {
				kinds[i] = strings.Trim(value, `"`)
			}
		}
		found[strings.TrimSpace(strings.Join(kinds, " "))] += must.Get(strconv.ParseFloat(value, 64))
	}
	must.Do(lines.Err())
	if len(found) == 0 {
		must.Fail("the metrics have no %s", name)
	}
	return found
}
