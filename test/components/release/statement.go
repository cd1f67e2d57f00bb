// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	provenance "github.com/in-toto/attestation/go/predicates/provenance/v1"
	intoto "github.com/in-toto/attestation/go/v1"
	spec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	"github.com/secure-systems-lab/go-securesystemslib/signerverifier"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/structpb"
)

const (
	payloadType   = "application/vnd.in-toto+json"
	predicateType = "https://slsa.dev/provenance/v1"
)

// source describes from what and how a release is built.
type source struct {
	module  string // path of the Go module, which is also the address of its repository
	commit  string
	version string
	builder string // URI of the machine or service that builds
	command string
}

func sign(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("sign", flag.ContinueOnError)
	keyFile := flags.String("key", "", "file with the private key, as PEM")
	out := flags.String("out", "", "file to write")
	var s source
	flags.StringVar(&s.module, "module", "", "path of the Go module")
	flags.StringVar(&s.commit, "commit", "", "full hash of the commit")
	flags.StringVar(&s.version, "version", "", "version of the release")
	flags.StringVar(&s.builder, "builder", "", "URI of the builder")
	flags.StringVar(&s.command, "command", "", "command that builds the artifacts")
	if err := flags.Parse(args); err != nil {
		return err
	}
	key, err := loadKey(*keyFile)
	if err != nil {
		return err
	}
	statement, err := newStatement(s, flags.Args())
	if err != nil {
		return err
	}
	signer, err := dsse.NewEnvelopeSigner(key)
	if err != nil {
		return err
	}
	envelope, err := signer.SignPayload(ctx, payloadType, statement)
	if err != nil {
		return fmt.Errorf("sign with %s: %w", *keyFile, err)
	}
	text, err := json.Marshal(envelope)
	if err != nil {
		return err
	}
	return os.WriteFile(*out, append(text, '\n'), 0o644)
}

func newStatement(s source, artifacts []string) ([]byte, error) {
	statement := &intoto.Statement{Type: intoto.StatementTypeUri, PredicateType: predicateType}
	repository := "git+https://" + s.module
	dependencies := []*intoto.ResourceDescriptor{{Uri: repository, Digest: map[string]string{"gitCommit": s.commit}}}
	for _, path := range artifacts {
		subjects, err := subjectsOf(path)
		if err != nil {
			return nil, err
		}
		statement.Subject = append(statement.Subject, subjects...)
		packages, err := packagesOf(path)
		if err != nil {
			return nil, err
		}
		dependencies = append(dependencies, packages...)
	}
	slices.SortFunc(dependencies[1:], func(a, b *intoto.ResourceDescriptor) int { return strings.Compare(a.Uri, b.Uri) })
	dependencies = slices.CompactFunc(dependencies, func(a, b *intoto.ResourceDescriptor) bool { return a.Uri == b.Uri })

	parameters, err := structpb.NewStruct(map[string]any{"repository": repository, "version": s.version, "command": s.command})
	if err != nil {
		return nil, err
	}
	build := &provenance.Provenance{
		BuildDefinition: &provenance.BuildDefinition{
			BuildType:            "https://" + s.module + "/Documentation/releasing.md",
			ExternalParameters:   parameters,
			ResolvedDependencies: dependencies,
		},
		RunDetails: &provenance.RunDetails{
			Builder: &provenance.Builder{Id: s.builder, Version: map[string]string{"go": runtime.Version()}},
		},
	}
	if err := build.Validate(); err != nil {
		return nil, err
	}
	raw, err := protojson.Marshal(build)
	if err != nil {
		return nil, err
	}
	statement.Predicate = &structpb.Struct{}
	if err := protojson.Unmarshal(raw, statement.Predicate); err != nil {
		return nil, err
	}
	if err := statement.Validate(); err != nil {
		return nil, err
	}
	raw, err = protojson.Marshal(statement)
	if err != nil {
		return nil, err
	}
	// protojson adds spaces at random, so that no program depends on its exact output.
	// Without them the statement is reproducible.
	var text bytes.Buffer
	err = json.Compact(&text, raw)
	return text.Bytes(), err
}

// subjectsOf returns the name and digest of a file. For an OCI archive it adds those of
// each entry of its index.json, because registries know an image only by that digest.
func subjectsOf(path string) ([]*intoto.ResourceDescriptor, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	subjects := []*intoto.ResourceDescriptor{{Name: filepath.Base(path), Digest: sha256Digest(hex.EncodeToString(sum.Sum(nil)))}}
	if !strings.HasSuffix(path, ".oci.tar") {
		return subjects, nil
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	for archive := tar.NewReader(f); ; {
		header, err := archive.Next()
		if err != nil {
			return nil, fmt.Errorf("find index.json in %s: %w", path, err)
		}
		if header.Name != "index.json" {
			continue
		}
		index, err := v1.ParseIndexManifest(archive)
		if err != nil {
			return nil, fmt.Errorf("parse index.json in %s: %w", path, err)
		}
		for _, m := range index.Manifests {
			subjects = append(subjects, &intoto.ResourceDescriptor{Name: m.Annotations[spec.AnnotationRefName], Digest: sha256Digest(m.Digest.Hex)})
		}
		return subjects, nil
	}
}

func sha256Digest(hexadecimal string) map[string]string {
	return map[string]string{"sha256": hexadecimal}
}

// packagesOf returns Debian's packages in a bill of materials, and none for a file with
// another extension. It omits Go modules: the source contains their checksums.
func packagesOf(path string) ([]*intoto.ResourceDescriptor, error) {
	if !strings.HasSuffix(path, ".cdx.json") {
		return nil, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var bom cdx.BOM
	if err := cdx.NewBOMDecoder(f, cdx.BOMFileFormatJSON).Decode(&bom); err != nil {
		return nil, fmt.Errorf("decode %s: %w", path, err)
	}
	var packages []*intoto.ResourceDescriptor
	if bom.Components == nil {
		return nil, fmt.Errorf("%s lists no components", path)
	}
	for _, c := range *bom.Components {
		if strings.HasPrefix(c.PackageURL, "pkg:deb/") && c.Hashes != nil {
			packages = append(packages, &intoto.ResourceDescriptor{Uri: c.PackageURL, Digest: sha256Digest((*c.Hashes)[0].Value)})
		}
	}
	return packages, nil
}

// verify checks the signature of a statement, and compares the digests in it with the
// artifacts. These must be in the folder of the statement.
func verify(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("verify", flag.ContinueOnError)
	keyFile := flags.String("key", "", "file with the public key, as PEM")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 1 {
		return errors.New("usage: release verify -key FILE STATEMENT")
	}
	path := flags.Arg(0)
	key, err := loadKey(*keyFile)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var envelope dsse.Envelope
	if err := json.Unmarshal(text, &envelope); err != nil {
		return fmt.Errorf("decode %s: %w", path, err)
	}
	verifier, err := dsse.NewEnvelopeVerifier(key)
	if err != nil {
		return err
	}
	_, payload, err := verifier.VerifyAndDecode(ctx, &envelope)
	if err != nil {
		return fmt.Errorf("verify the signature of %s: %w", path, err)
	}
	var statement intoto.Statement
	if err := protojson.Unmarshal(payload, &statement); err != nil {
		return fmt.Errorf("decode the statement in %s: %w", path, err)
	}
	if envelope.PayloadType != payloadType || statement.PredicateType != predicateType {
		return fmt.Errorf("%s is a %s with the predicate %s: want %s with %s", path, envelope.PayloadType, statement.PredicateType, payloadType, predicateType)
	}
	if err := checkSubjects(filepath.Dir(path), statement.Subject); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s: signature and %d subjects are correct\n", path, len(statement.Subject))
	return err
}

// checkSubjects returns an error unless all subjects of a statement are in a folder, with
// the same digests. A subject with a slash in its name is an image, and must be in one of
// the archives.
func checkSubjects(folder string, want []*intoto.ResourceDescriptor) error {
	have := map[string]string{}
	for _, subject := range want {
		if strings.Contains(subject.Name, "/") {
			continue
		}
		found, err := subjectsOf(filepath.Join(folder, subject.Name))
		if err != nil {
			return err
		}
		for _, s := range found {
			have[s.Name] = s.Digest["sha256"]
		}
	}
	for _, subject := range want {
		if digest := have[subject.Name]; digest == "" || digest != subject.Digest["sha256"] {
			return fmt.Errorf("%s has the sha256 %q: want %s", subject.Name, digest, subject.Digest["sha256"])
		}
	}
	return nil
}

func loadKey(path string) (*signerverifier.ED25519SignerVerifier, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the key: %w", err)
	}
	key, err := signerverifier.LoadKey(text)
	if err != nil {
		return nil, fmt.Errorf("read the key in %s: %w", path, err)
	}
	if key.KeyType != signerverifier.ED25519KeyType {
		return nil, fmt.Errorf("key in %s is of the type %s: want %s", path, key.KeyType, signerverifier.ED25519KeyType)
	}
	return signerverifier.NewED25519SignerVerifierFromSSLibKey(key)
}
