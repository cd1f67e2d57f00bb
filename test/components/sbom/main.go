// SPDX-License-Identifier: Apache-2.0

// Command sbom writes the bill of materials of Go programs, in CycloneDX's JSON,
// from what the compiler has recorded in them: sbom [-packages LIST] VERSION PROGRAM...
//
// LIST is a file with packages of Debian that an image contains beside the programs. Each
// line has the name, version, architecture and SHA-256 sum of a package.
package main

import (
	"cmp"
	"debug/buildinfo"
	"flag"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

func main() {
	packages := flag.String("packages", "", "file with a list of Debian packages")
	flag.Parse()
	if flag.NArg() < 2 {
		fmt.Fprintln(os.Stderr, "usage: sbom [-packages LIST] VERSION PROGRAM...")
		os.Exit(2)
	}
	if err := run(flag.Arg(0), flag.Args()[1:], *packages); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func run(version string, programs []string, packages string) error {
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{Component: component(cdx.ComponentTypeApplication, "flanneld", version)}
	bom.Metadata.Component.BOMRef = "release" // not the usual reference, which one of the programs has too
	if seconds, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64); err == nil {
		bom.Metadata.Timestamp = time.Unix(seconds, 0).UTC().Format(time.RFC3339)
	}
	root := bom.Metadata.Component.BOMRef
	modules := map[string]cdx.Component{}
	needs := map[string][]string{root: nil}
	for _, path := range programs {
		info, err := buildinfo.ReadFile(path)
		if err != nil {
			return fmt.Errorf("read %s: %w", path, err)
		}
		program := component(cdx.ComponentTypeApplication, filepath.Base(path), version)
		modules[program.BOMRef] = *program
		needs[root] = append(needs[root], program.BOMRef)
		std := component(cdx.ComponentTypeLibrary, "std", info.GoVersion[len("go"):])
		modules[std.BOMRef] = *std
		needs[program.BOMRef] = []string{std.BOMRef}
		for _, dep := range info.Deps {
			if dep.Replace != nil {
				dep = dep.Replace
			}
			module := component(cdx.ComponentTypeLibrary, dep.Path, dep.Version)
			modules[module.BOMRef] = *module
			needs[program.BOMRef] = append(needs[program.BOMRef], module.BOMRef)
		}
	}
	debs, err := readPackages(packages)
	if err != nil {
		return err
	}
	for _, deb := range debs {
		modules[deb.BOMRef] = deb
		needs[root] = append(needs[root], deb.BOMRef)
	}
	components, dependencies := []cdx.Component{}, []cdx.Dependency{}
	for _, m := range modules {
		components = append(components, m)
	}
	slices.SortFunc(components, func(a, b cdx.Component) int { return cmp.Compare(a.BOMRef, b.BOMRef) })
	for ref, on := range needs {
		slices.Sort(on)
		dependencies = append(dependencies, cdx.Dependency{Ref: ref, Dependencies: &on})
	}
	slices.SortFunc(dependencies, func(a, b cdx.Dependency) int { return cmp.Compare(a.Ref, b.Ref) })
	bom.Components, bom.Dependencies = &components, &dependencies
	return cdx.NewBOMEncoder(os.Stdout, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom)
}

func readPackages(path string) ([]cdx.Component, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var packages []cdx.Component
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) != 4 {
			return nil, fmt.Errorf("%s contains %q: want name, version, architecture and sum", path, line)
		}
		c := component(cdx.ComponentTypeLibrary, f[0], f[1])
		c.PackageURL = fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s", f[0], url.QueryEscape(f[1]), f[2])
		c.BOMRef = c.PackageURL
		c.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: f[3]}}
		packages = append(packages, *c)
	}
	return packages, nil
}

// component returns the entry of a Go module, if kind is a library, or of a program of
// this project. Its reference is the module's package URL, or the program's name and
// version.
func component(kind cdx.ComponentType, name, version string) *cdx.Component {
	c := &cdx.Component{Type: kind, Name: name, Version: version, BOMRef: name + "@" + version}
	if kind == cdx.ComponentTypeLibrary {
		c.PackageURL = "pkg:golang/" + name + "@" + version
		c.BOMRef = c.PackageURL
	}
	return c
}
