// SPDX-License-Identifier: Apache-2.0

package options

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/spell"
)

const envPrefix = "FLANNELD_"

// The errors that Parse returns if the command line asks for something else than running
// the daemon.
var (
	// ErrHelp means to print Help and exit with 0.
	ErrHelp = flag.ErrHelp
	// ErrVersion means to print the version and exit with 0.
	ErrVersion = errors.New("version requested")
)

// Parse parses the arguments after the program's name, and the environment
// ("NAME=value"). A flag has precedence over its variable, and an empty variable counts
// as not set. An error is one line that names the mistake and the expected value.
func Parse(args, env []string) (Options, error) {
	o := Options{sources: map[string]string{}}
	all := settings(&o)
	for _, s := range all {
		if s.def == "" {
			continue
		}
		if err := s.set(s.def); err != nil {
			return Options{}, fmt.Errorf("default of --%s: %w", s.name, err)
		}
	}

	flags, err := commandLine(all, args)
	if err != nil {
		return Options{}, err
	}
	if err := o.apply(all, flags); err != nil {
		return Options{}, err
	}
	if o.version {
		return Options{}, ErrVersion
	}

	vars, warnings := environment(all, env, flags)
	if err := o.apply(all, vars); err != nil {
		return Options{}, err
	}
	o.Warnings = append(o.Warnings, warnings...)

	o.readPod(env)
	if err := o.check(); err != nil {
		return Options{}, err
	}
	return o, nil
}

// Given returns the text that a command line or an environment gives each flag, by the name of the flag. Like
// Parse it prefers a flag to its variable, and ignores empty variables. It judges no text. The last of
// several texts counts.
func Given(args, env []string) (map[string]string, error) {
	all := settings(&Options{})
	flags, err := commandLine(all, args)
	if err != nil {
		return nil, err
	}
	vars, _ := environment(all, env, flags)

	texts := map[string]string{}
	for _, from := range []values{vars, flags} {
		for name, c := range from {
			texts[name] = c.texts[len(c.texts)-1]
		}
	}
	return texts, nil
}

// readPod reads the variables with which a manifest describes its pod.
func (o *Options) readPod(env []string) {
	for _, e := range env {
		switch name, value, _ := strings.Cut(e, "="); name {
		case "NODE_NAME":
			o.NodeName = value
		case "POD_NAME":
			o.PodName = value
		case "POD_NAMESPACE":
			o.PodNamespace = value
		}
	}
}

// values are by the name of the flag.
type values map[string]*collected

type collected struct {
	source string
	texts  []string
}

// apply also records the source of each option.
func (o *Options) apply(all []setting, given values) error {
	for _, s := range all {
		c, ok := given[s.name]
		if !ok {
			continue
		}
		o.sources[s.name] = c.source
		for _, text := range c.texts {
			if err := s.set(text); err != nil {
				return fmt.Errorf("%s %q is invalid: %w", c.source, redact(text), err)
			}
		}
	}
	return nil
}

// commandLine returns only flags that are given. Go's package flag reads -iface like --iface, and so does flannel.
// pflag would read it as the five short flags i, f, a, c and e.
func commandLine(all []setting, args []string) (values, error) {
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.Usage = func() {}

	// The texts are parsed later, in the same way as those of variables.
	found := values{}
	for _, s := range all {
		add := func(text string) error {
			if found[s.name] == nil {
				found[s.name] = &collected{source: "--" + s.name}
			}
			found[s.name].texts = append(found[s.name].texts, text)
			return nil
		}
		if s.arg == "" {
			fs.BoolFunc(s.name, "", add)
		} else {
			fs.Func(s.name, "", add)
		}
	}

	err := fs.Parse(args)

	// Templates that leave a value empty pass an empty argument, such as kubespray's
	// args: ["--ip-masq", ""]. It has no effect, and the flags after it count.
	for err == nil && fs.NArg() > 0 && fs.Arg(0) == "" {
		err = fs.Parse(fs.Args()[1:])
	}

	read := args[:len(args)-fs.NArg()]
	switch {
	case errors.Is(err, flag.ErrHelp):
		return nil, ErrHelp
	case err != nil:
		return nil, badFlag(fs, all, read)
	case fs.NArg() > 0:
		return nil, badArgument(fs, read, fs.Arg(0))
	}

	return found, nil
}

// badFlag returns why package flag stopped after the arguments in read: at an unknown flag, at the
// last flag without its value, or before an argument that begins with a dash and is not a flag.
func badFlag(fs *flag.FlagSet, all []setting, read []string) error {
	var last, name string
	if len(read) > 0 {
		last = read[len(read)-1]
		name, _, _ = strings.Cut(strings.TrimLeft(last, "-"), "=")
	}

	known := last == name || fs.Lookup(name) != nil
	if known && fs.NArg() > 0 {
		return fmt.Errorf("argument %q is not a flag: expected --name or --name=value", redact(fs.Arg(0)))
	}
	if known {
		return fmt.Errorf("--%s needs a value", name)
	}
	if near, ok := spell.Meant(name, names(all)); ok {
		return fmt.Errorf("unknown flag --%s: did you mean --%s?", onOneLine(name), near)
	}
	return fmt.Errorf("unknown flag --%s: see --help", onOneLine(name))
}

// badArgument returns why arg, the first argument that is not a flag, is refused.
func badArgument(fs *flag.FlagSet, read []string, arg string) error {
	// It is usually the value of a boolean flag, which needs a "=".
	if _, err := strconv.ParseBool(arg); err == nil && len(read) > 0 {
		last := read[len(read)-1]
		name := strings.TrimLeft(last, "-")
		if strings.HasPrefix(last, "-") && fs.Lookup(name) != nil {
			return fmt.Errorf("unexpected argument %q: expected --%s=%s", arg, name, arg)
		}
	}
	return fmt.Errorf("unexpected argument %q: expected flags only, see --help", redact(arg))
}

// environment ignores variables whose flags are given, and returns a warning for each variable that
// looks misspelt.
func environment(all []setting, env []string, flags values) (vars values, warnings []string) {
	byVar := map[string]string{}
	for _, s := range all {
		byVar[Variable(s.name)] = s.name
	}

	known := names(all)
	vars = values{}
	for _, kv := range env {
		variable, text, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(variable, envPrefix) || text == "" {
			continue
		}

		name, ok := byVar[variable]
		if !ok {
			name = strings.ToLower(strings.TrimPrefix(variable, envPrefix))
			if near, ok := spell.Meant(name, known); ok && name != "help" {
				warnings = append(warnings, fmt.Sprintf("%s is ignored: did you mean %s?", onOneLine(variable), Variable(near)))
			}
			continue
		}

		// --version has no variable, because it is not a setting.
		if _, given := flags[name]; !given && name != "version" {
			vars[name] = &collected{source: variable, texts: []string{text}}
		}
	}
	return vars, warnings
}

// Variable returns the name of the variable that sets the flag.
func Variable(name string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
}

func names(all []setting) []string {
	var ns []string
	for _, s := range all {
		ns = append(ns, s.name)
	}
	return ns
}

func onOneLine(name string) string { return strings.Trim(strconv.Quote(name), `"`) }

// redact hides the user and password of a URL.
func redact(text string) string {
	at := strings.LastIndexByte(text, '@')
	if at < 0 {
		return text
	}
	start := strings.Index(text, "://") + len("://")
	if start > at || start < len("://") {
		start = 0
	}
	return text[:start] + "[redacted]" + text[at:]
}
