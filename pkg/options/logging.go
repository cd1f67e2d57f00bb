// SPDX-License-Identifier: Apache-2.0

package options

import (
	"flag"
	"fmt"
	"log/slog"
	"math"
	"os"
	"strconv"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

// SetupLogging makes klog, whose state is global to the process, log to stderr with the format
// and the verbosity of o. In either format klog decides which lines are logged.
func (o Options) SetupLogging() error {
	fs := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(fs)
	for _, f := range [][2]string{
		{"logtostderr", "true"},
		{"legacy_stderr_threshold_behavior", "false"},
		{"stderrthreshold", "INFO"},
		{"v", strconv.Itoa(o.Verbosity)},
		{"vmodule", o.VModule},
		{"log_backtrace_at", o.LogBacktraceAt},
	} {
		if err := fs.Set(f[0], f[1]); err != nil {
			return fmt.Errorf("set log option %s to %q: %w", f[0], f[1], err)
		}
	}

	if o.LogFormat == logJSON {
		// The logger is not made a contextual logger, because klog does not apply v and
		// vmodule to contextual loggers.
		klog.SetLoggerWithOptions(logr.FromSlogHandler(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{
			Level:       slog.Level(math.MinInt32),
			ReplaceAttr: plainLevel,
		})))
	}
	return nil
}

// plainLevel is DEBUG for every line above verbosity 0, where slog would add a number, such as
// DEBUG+2.
func plainLevel(groups []string, a slog.Attr) slog.Attr {
	if level, ok := a.Value.Any().(slog.Level); ok && len(groups) == 0 && a.Key == slog.LevelKey && level < slog.LevelInfo {
		a.Value = slog.StringValue(slog.LevelDebug.String())
	}
	return a
}
