// SPDX-License-Identifier: Apache-2.0

package main

import (
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

	"github.com/flanneld/flanneld/pkg/status"
)

// networkFlag is the name of the flag that chooses one of several networks.
const networkFlag = "network"

// statusTimeout limits the time that a daemon may take to answer.
const statusTimeout = 10 * time.Second

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
	fail := func(err error) (status.Report, error) { return r, fmt.Errorf("ask flanneld for its status: %w", err) }
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
		return fail(errors.New(strings.TrimSpace(string(text))))
	}
	if resp.StatusCode != http.StatusOK {
		return fail(fmt.Errorf("GET %s: %s", address, resp.Status))
	}
	if err := json.NewDecoder(resp.Body).Decode(&r); err != nil {
		return fail(err)
	}
	return r, nil
}

// fetchOne asks a daemon for the report about one network. If network is empty and the
// daemon serves several, the error names them.
func fetchOne(ctx context.Context, client *http.Client, base, network string) (status.Report, error) {
	r, err := fetch(ctx, client, base, network)
	if err != nil || len(r.Networks) == 0 {
		return r, err
	}
	var names []string
	for _, n := range r.Networks {
		names = append(names, n.Name)
	}
	return r, fmt.Errorf("this daemon serves several networks: choose one of %s with --%s", strings.Join(names, ", "), networkFlag)
}
