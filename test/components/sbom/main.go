// SPDX-License-Identifier: Apache-2.0

// Command sbom writes the bill of materials of Go programs, in CycloneDX's JSON,
// from what the compiler has recorded in them: sbom VERSION PROGRAM...
package main

import (
	"cmp"
	"debug/buildinfo"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: sbom VERSION PROGRAM...")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func run(version string, programs []string) error {
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{Component: component(cdx.ComponentTypeApplication, "flanneld", version)}
	bom.Metadata.Component.BOMRef = "release" // one of the programs has the same name
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

// component is known by its package URL, programs of this project by their names.
func component(kind cdx.ComponentType, name, version string) *cdx.Component {
	c := &cdx.Component{Type: kind, Name: name, Version: version, BOMRef: name + "@" + version}
	if kind == cdx.ComponentTypeLibrary {
		c.PackageURL = "pkg:golang/" + name + "@" + version
		c.BOMRef = c.PackageURL
	}
	return c
}
