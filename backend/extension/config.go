// SPDX-License-Identifier: Apache-2.0

package extension

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/flanneld/flanneld/subnet"
)

// The configuration keys of the commands.
const (
	preStartup   = "PreStartupCommand"
	postStartup  = "PostStartupCommand"
	subnetAdd    = "SubnetAddCommand"
	subnetRemove = "SubnetRemoveCommand"
	shutdown     = "ShutdownCommand"
)

const (
	defaultTimeout = 30   // seconds
	maxTimeout     = 3600 // seconds
)

// configKeys is the Backend object of the network configuration.
type configKeys struct {
	PreStartupCommand   string // command that runs before the host takes its subnet; the host publishes its output in the lease
	PostStartupCommand  string // command that runs when the host has its subnet
	SubnetAddCommand    string // command that runs for the subnet of each other host, when the subnet appears or its lease changes
	SubnetRemoveCommand string // command that runs when the subnet of another host is gone, and before SubnetAddCommand runs again for it
	ShutdownCommand     string // command that runs when flanneld is stopped
	Shell               *bool  // true: sh runs all commands; false: sh runs none; absent: sh runs those with shell syntax
	CommandTimeout      int    // seconds after which a command that still runs is killed, with its children
}

func defaults() configKeys { return configKeys{CommandTimeout: defaultTimeout} }

// Defaults returns the keys of Backend with their defaults, as a struct. The reference
// page is generated from it and from the comments of its fields.
func Defaults() any { return defaults() }

// config contains the commands to run. A command that is not configured is zero.
type config struct {
	pre, post, add, remove, shutdown command
	timeout                          time.Duration
}

func parseConfig(raw json.RawMessage) (c config, warnings []string, err error) {
	w := defaults()
	if warnings, err = subnet.DecodeBackend(raw, &w); err != nil {
		return c, nil, err
	}
	if w.CommandTimeout < 1 || w.CommandTimeout > maxTimeout {
		return c, nil, fmt.Errorf("Backend.CommandTimeout is %d: want 1 to %d seconds", w.CommandTimeout, maxTimeout)
	}

	c.timeout = time.Duration(w.CommandTimeout) * time.Second
	for _, one := range []struct {
		name, line string
		into       *command
	}{
		{preStartup, w.PreStartupCommand, &c.pre},
		{postStartup, w.PostStartupCommand, &c.post},
		{subnetAdd, w.SubnetAddCommand, &c.add},
		{subnetRemove, w.SubnetRemoveCommand, &c.remove},
		{shutdown, w.ShutdownCommand, &c.shutdown},
	} {
		if *one.into, err = newCommand(one.name, one.line, w.Shell); err != nil {
			return c, nil, fmt.Errorf("Backend.%s: %w", one.name, err)
		}
	}
	return c, warnings, nil
}

// command is a configured command. The zero command does nothing.
type command struct {
	Name  string `json:"name,omitempty"` // the configuration key
	Line  string `json:"line,omitempty"`
	Shell bool   `json:"shell,omitempty"` // run by sh -c; otherwise executed directly, without a shell
}

func newCommand(name, line string, shell *bool) (command, error) {
	if strings.TrimSpace(line) == "" {
		return command{}, nil
	}
	if strings.ContainsRune(line, 0) {
		return command{}, errors.New("want a command line, have one with a NUL character")
	}
	c := command{Name: name, Line: line, Shell: needsShell(line)}
	if shell != nil {
		c.Shell = *shell
	}
	return c, nil
}

func (c command) configured() bool { return c.Line != "" }

// plain matches command lines that mean the same to a shell and to a program that only splits
// words and replaces variables. Any other character may be shell syntax.
var plain = regexp.MustCompile(`^(?:[^\n\r|&;<>()\x60"'\\*?\[\]{}~#!$]|\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\})*$`)

// builtins are first words that only a shell can execute.
var builtins = strings.Fields(`. : alias case cd command eval exec exit export for if local read readonly
	return set shift source times trap type ulimit umask unset until wait while`)

func needsShell(line string) bool {
	words := strings.Fields(line)
	return !plain.MatchString(line) || slices.Contains(builtins, words[0]) || strings.Contains(words[0], "=")
}
