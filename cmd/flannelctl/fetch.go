// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// networkFlag is the name of the flag that chooses one of several networks.
const networkFlag = "network"

// statusTimeout limits the time that a daemon may take to answer.
const statusTimeout = 10 * time.Second

// maxReport limits the size of an answer, in bytes. A report about 10,000 peers has some 20 MB.
const maxReport = 128 << 20

// unknownError makes the exit code 2: the command could not ask flanneld, so it does not know whether something is
// broken.
type unknownError struct{ cause error }

// Error implements error.
func (e unknownError) Error() string { return "ask flanneld for its status: " + e.cause.Error() }

// Unwrap returns the cause.
func (e unknownError) Unwrap() error { return e.cause }

// errNotReady makes the exit code 1. The command has already printed the reason.
var errNotReady = errors.New("flanneld is not ready")

// addNetworkTo adds the flag that chooses one of several networks, and returns its
// value.
func addNetworkTo(cmd *cobra.Command) *string {
	return cmd.PersistentFlags().String(networkFlag, "", "one of several networks, by name")
}

// fetch asks the daemon at the URL base for its report about one network. If network is empty, a
// daemon with one network reports about that one, and a daemon with several lists them in Networks.
func fetch(ctx context.Context, client *http.Client, base, network string) (r status.Report, err error) {
	fail := func(err error) (status.Report, error) {
		return r, unknownError{cause(err)} // without the URL, which only stands for the socket
	}

	address, err := url.JoinPath(base, "statusz.json")
	if err != nil {
		return fail(err)
	}
	if network != "" {
		address += "?network=" + url.QueryEscape(network)
	}

	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return fail(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return fail(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusNotFound && network != "" {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return r, errors.New(strings.TrimSpace(string(text)))
	}
	if resp.StatusCode != http.StatusOK {
		return fail(fmt.Errorf("GET %s: %s", address, resp.Status))
	}

	text, err := io.ReadAll(io.LimitReader(resp.Body, maxReport+1))
	if err != nil {
		return fail(err)
	}
	if len(text) > maxReport {
		return fail(fmt.Errorf("GET %s: the answer is larger than %d MiB", address, maxReport>>20))
	}
	if text, err = printable(text); err == nil {
		err = json.Unmarshal(text, &r)
	}
	if err != nil {
		return fail(err)
	}
	return r, nil
}

// cause returns an error of the HTTP client without the method and the URL.
func cause(err error) error {
	if e := (*url.Error)(nil); errors.As(err, &e) {
		return e.Err
	}
	return err
}

// printable returns a JSON document with all strings on one line and without characters that control a
// terminal. Reports contain texts that other hosts have written.
func printable(document []byte) ([]byte, error) {
	var v any
	d := json.NewDecoder(bytes.NewReader(document))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		return nil, err
	}

	var clean func(any) any
	clean = func(v any) any {
		switch v := v.(type) {
		case string:
			return oneline.Collapse(v)
		case []any:
			for i := range v {
				v[i] = clean(v[i])
			}
		case map[string]any:
			cleaned := make(map[string]any, len(v))
			for key, value := range v {
				cleaned[oneline.Collapse(key)] = clean(value)
			}
			return cleaned
		}
		return v
	}
	return json.Marshal(clean(v))
}

// socketURL is the base of the URLs of the daemon of this host, which is asked through its socket.
const socketURL = "http://flanneld"

// fetchAll asks the daemon of this host for the reports about all its networks, or about one of them.
func fetchAll(ctx context.Context, client *http.Client, network string) ([]status.Report, error) {
	r, err := fetch(ctx, client, socketURL, network)
	if err != nil || len(r.Networks) == 0 {
		return []status.Report{r}, err
	}
	var all []status.Report
	for _, n := range r.Networks {
		one, err := fetch(ctx, client, socketURL, n.Name)
		if err != nil {
			return nil, err
		}
		all = append(all, one)
	}
	return all, nil
}

// fetchOne asks the daemon of this host for the report about one network. If network is empty and the
// daemon serves several, the error names them.
func fetchOne(ctx context.Context, client *http.Client, network string) (status.Report, error) {
	r, err := fetch(ctx, client, socketURL, network)
	if err != nil || len(r.Networks) == 0 {
		return r, err
	}
	var names []string
	for _, n := range r.Networks {
		names = append(names, n.Name)
	}
	return r, fmt.Errorf("this daemon serves several networks: choose one of %s with --%s", strings.Join(names, ", "), networkFlag)
}
