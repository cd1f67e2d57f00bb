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

// SetupLogging makes klog, whose state is global to the process, log to stderr in the
// format of o. klog decides which lines are logged in either format.
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
		// Not as a contextual logger, because those ignore v and vmodule.
		klog.SetLoggerWithOptions(logr.FromSlogHandler(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{
			Level:       slog.Level(math.MinInt32),
			ReplaceAttr: plainLevel,
		})))
	}
	return nil
}

// plainLevel names every verbosity DEBUG. slog would add or subtract a number.
func plainLevel(groups []string, a slog.Attr) slog.Attr {
	if level, ok := a.Value.Any().(slog.Level); ok && len(groups) == 0 && a.Key == slog.LevelKey && level < slog.LevelInfo {
		a.Value = slog.StringValue(slog.LevelDebug.String())
	}
	return a
}
